"""The command line: argv, environment, exit codes. Every command imports what it needs when it runs."""

import os
import sys

import click
import typer

from asyncrl import __version__
from asyncrl.cli import after, before, running
from asyncrl.errors import AsyncRLError

app = typer.Typer(
    name="asyncrl",
    help="Reinforcement learning of language models that never waits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for commands in (running, before, after):
    app.add_typer(commands.app)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point: a mistake of the user's is a message and exit status 2, never a traceback."""
    # To find plugins, pydantic reads the metadata of every installed package: a third of the time until `validate` answers.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    try:
        if status := app(standalone_mode=False):  # of `typer.Exit`; commands return nothing
            sys.exit(status)
    except AsyncRLError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg="red" if sys.stderr.isatty() else None, err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # `asyncrl samples | head`: the reader has left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
