"""Commands for before a run: they start nothing of it."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import Overrides

app = typer.Typer()
reward = typer.Typer(help="Try out reward functions.")
app.add_typer(reward, name="reward")


@app.command()
def validate(config: Annotated[Path, typer.Argument()], overrides: Overrides = None) -> None:
    """Check a config: all mistakes at once, without loading a model."""
    from asyncrl.preflight.validate import validated_config

    validated_config(config, overrides or [])
    typer.echo(f"{config}: fine")


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Check what this run needs, too.")] = None,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Try out this machine: every check is executed, every failure comes with its fix. Exit status 1 when one failed."""
    from asyncrl.preflight.doctor import examine

    if not examine(config, overrides or [], as_json=json):
        raise typer.Exit(1)


@app.command()
def plan(
    config: Annotated[Path, typer.Argument()],
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Say what a config asks of this machine: batches, staleness, store, memory; each number with how it is formed."""
    from asyncrl.preflight.plan import show_plan

    show_plan(config, overrides or [], as_json=json)


@reward.command("test")
def reward_test(
    config: Annotated[Path, typer.Argument()],
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("--n", min=1, help="Prompts of the data, or samples.")] = 8,
    samples: Annotated[
        Path | None, typer.Option(help="Run directory, or JSONL with `response` and a row's columns; default: wrong answers.")
    ] = None,
) -> None:
    """Score reference and wrong answers, or samples, as a run would: parts, times, failures. Exit status 1 when any failed."""
    from asyncrl.preflight.reward_trial import try_rewards

    if not try_rewards(config, overrides or [], count=count, samples=samples):
        raise typer.Exit(1)


@app.command()
def warmup(directory: Path, seed: int = 0) -> None:
    """Build the quick-start model: tiny, and barely able to add two numbers."""
    from asyncrl.launch.warmup import build_quickstart

    build_quickstart(directory, seed=seed, report=typer.echo)
