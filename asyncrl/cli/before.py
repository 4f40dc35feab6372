"""Commands for before a run: they start nothing of it."""

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.arguments import ConfigOption, MaybeWords, Words, config_and_overrides, required_config
from asyncrl.cli.options import Json

app = typer.Typer()
reward = typer.Typer(help="Try out reward functions.")
app.add_typer(reward, name="reward")


@app.command()
def validate(words: Words = None, config: ConfigOption = None) -> None:
    """Check a config: all mistakes at once, without loading a model."""
    from asyncrl.preflight.doubts import doubts
    from asyncrl.preflight.validate import validated_config

    file, overrides = required_config(words, config)
    for doubt in doubts(validated_config(file, overrides, resumes=True), file, overrides):
        typer.echo(f"! {doubt}")
    typer.echo(f"{file}: fine")


@app.command()
def doctor(words: MaybeWords = None, config: ConfigOption = None, json: Json = False) -> None:
    """Try out this machine, and what a run needs of it: every failure comes with its fix. Exit status 1 when a check failed."""
    from asyncrl.preflight.doctor import examine

    if not examine(*config_and_overrides(words, config), as_json=json):
        raise typer.Exit(1)


@app.command()
def plan(words: Words = None, config: ConfigOption = None, json: Json = False) -> None:
    """Say what a config asks of this machine: batches, staleness, store, memory; each number with how it is formed."""
    from asyncrl.preflight.planning import show_plan

    show_plan(*required_config(words, config), as_json=json)


@reward.command("test")
def reward_test(
    words: Words = None,
    config: ConfigOption = None,
    count: Annotated[int, typer.Option("--n", min=1, help="Prompts of the data, or samples.")] = 8,
    samples: Annotated[
        Path | None, typer.Option(help="Run directory, or JSONL with `response` and a row's columns; default: wrong answers.")
    ] = None,
) -> None:
    """Score reference and wrong answers, or samples, as a run would: parts, times, failures. Exit status 1 when any failed."""
    from asyncrl.preflight.reward_trial import try_rewards

    if not try_rewards(*required_config(words, config), count=count, samples=samples):
        raise typer.Exit(1)


@app.command()
def warmup(directory: Path, seed: int = 0) -> None:
    """Build the quick-start model: tiny, and barely able to add two numbers."""
    from asyncrl.quickstart.warmup import build_quickstart

    build_quickstart(directory, seed=seed, report=typer.echo)
