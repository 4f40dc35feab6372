"""All commands. Every command imports what it needs when it runs."""

from collections.abc import Sequence
from typing import Annotated

import typer

from asyncrl.cli import after, before, running, watching
from asyncrl.cli.arguments import plain_overrides
from asyncrl.version import __version__

COMPLETION = "_ASYNCRL_COMPLETE"
app = typer.Typer(
    name="asyncrl",
    help="Asynchronous reinforcement learning for language models.",
    epilog="A config is named as FILE or --config FILE, and changed by KEY=VALUE: asyncrl up task.yaml "
    "learner.steps=200",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for commands in (running.app, watching.app, running.series, before.app, after.app):
    app.add_typer(commands)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def run(arguments: Sequence[str], *, completes: bool = False) -> int:
    """Run a command and return the exit status that it chose. Raises the command's errors.

    `completes` if the shell asks for completions, in the variable `COMPLETION`.
    """
    command = typer.main.get_command(app)
    if completes:
        command.main([*arguments], "asyncrl", complete_var=COMPLETION)
    try:
        with command.make_context("asyncrl", plain_overrides(arguments)) as context:
            command.invoke(context)
    except typer.Exit as chosen:
        return int(chosen.exit_code)
    return 0
