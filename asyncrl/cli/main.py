"""The command line: argv, environment, exit codes. Every command imports what it needs when it runs."""

import os
import sys
from pathlib import Path
from typing import Annotated

import click
import typer

from asyncrl import __version__
from asyncrl.errors import AsyncRLError

app = typer.Typer(
    name="asyncrl",
    help="Reinforcement learning of language models that never waits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, over what the file says.", show_default=False)]
RunArgument = Annotated[Path | None, typer.Argument(help="Run directory or name; default: the newest run.", show_default=False)]
StoreOption = Annotated[str | None, typer.Option(help="Store of a run: redis://, rediss:// or unix:// URL.")]


@app.command()
def up(
    config: ConfigOption,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option(help="Throw away what an earlier run of this name left.")] = False,
    plain: Annotated[bool, typer.Option(help="Lines instead of the dashboard.")] = False,
) -> None:
    """Train on this box: store, learner, generators, dashboard. Called again, it resumes."""
    from asyncrl.config.load import load_config
    from asyncrl.launch.up import run_here

    run_here(load_config(config, overrides or []), fresh=fresh, generators=True, plain=plain)


@app.command()
def learner(
    config: ConfigOption,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option(help="Throw away what an earlier run of this name left.")] = False,
) -> None:
    """Run the learner alone, and a store if none is configured; generators join by `asyncrl generator`."""
    from asyncrl.config.load import load_config
    from asyncrl.launch.up import run_here

    run_here(load_config(config, overrides or []), fresh=fresh, generators=False, plain=True)


@app.command()
def generator(
    count: Annotated[int, typer.Option(min=1, help="Generators to start on this host.")] = 1,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Default: the run's own config, from the store.")] = None,
    store: StoreOption = None,
) -> None:
    """Run generators that join a run. With neither option, the newest run on this host."""
    from asyncrl.launch.join import run_generators

    run_generators(count=count, config_path=config, store_url=store)


@app.command()
def status(
    run: RunArgument = None,
    json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    watch: Annotated[bool, typer.Option(help="Keep showing the dashboard.")] = False,
) -> None:
    """Show how a run is doing."""
    from asyncrl.launch.inspect import show_status

    show_status(run, as_json=json, watch_it=watch)


@app.command()
def down(run: RunArgument = None) -> None:
    """Stop a run and check that nothing of it is left."""
    from asyncrl.launch.down import stop_run

    stop_run(run)


@app.command()
def samples(
    run: RunArgument = None,
    count: Annotated[int, typer.Option(min=1)] = 5,
    step: Annotated[int | None, typer.Option(help="Only of this step.")] = None,
    kind: Annotated[str | None, typer.Option(help="train or eval.")] = None,
) -> None:
    """Show rollouts: prompt, response, reward parts, versions."""
    from asyncrl.launch.inspect import show_samples

    show_samples(run, count=count, step=step, kind=kind)


@app.command()
def audit(run: RunArgument = None, store: StoreOption = None) -> None:
    """Prove that no group was lost or trained twice: where is every issued id?"""
    from asyncrl.launch.inspect import show_audit

    show_audit(run, store_url=store)


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A run (its newest checkpoint) or a model directory.")],
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Needed with a model directory.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.path=value")] = None,
) -> None:
    """Evaluate a checkpoint or model on the held-out prompts of a config."""
    from asyncrl.launch.evaluate import evaluate_model

    evaluate_model(model, config, overrides or [])


@app.command()
def export(run: RunArgument = None, to: Annotated[Path, typer.Option("--to", help="New directory.")] = Path("export")) -> None:
    """Copy the newest checkpoint as a Hugging Face model directory."""
    from asyncrl.launch.inspect import export_run

    export_run(run, to)


@app.command()
def validate(config: Annotated[Path, typer.Argument()], overrides: Overrides = None) -> None:
    """Check a config: all mistakes at once, without loading a model."""
    from asyncrl.config.load import check_files, load_config

    check_files(load_config(config, overrides or []))
    typer.echo(f"{config}: fine")


@app.command()
def warmup(directory: Path, seed: int = 0) -> None:
    """Build the quick-start model: tiny, and barely able to add two numbers."""
    from asyncrl.launch.warmup import build_quickstart

    build_quickstart(directory, seed=seed, report=typer.echo)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point: a mistake of the user's is a message and exit status 2, never a traceback."""
    try:
        app(standalone_mode=False)
    except AsyncRLError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg="red" if sys.stderr.isatty() else None, err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except BrokenPipeError:
        # `asyncrl samples | head`: the reader has left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
