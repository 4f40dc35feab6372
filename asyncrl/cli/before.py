"""Commands that prepare a run."""

import json
import sys
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncrl.cli.arguments import ConfigOption, Json, Words, named, required_config

app = typer.Typer()
reward = typer.Typer(help="Try out reward functions.")
app.add_typer(reward, name="reward")
environment = typer.Typer(help="Try out an environment.")
app.add_typer(environment, name="environment")


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Default: the current one.", show_default=False)] = Path(),
    yes: Annotated[bool, typer.Option("--yes", help="Take the defaults, as without a terminal.")] = False,
) -> None:
    """Ask five questions, and write a task to begin with: config, example rows, reward.

    No file is written over.
    """
    from asyncrl.hosting.gpus import count_gpus
    from asyncrl.quickstart.first_task import CONFIG, EXAMPLES, OWN, ROWS, Answers, require_absent, write_task

    file, answers = directory / CONFIG, Answers(device="gpu" if count_gpus() else "cpu")
    require_absent([file])
    if not yes and sys.stdin.isatty():
        answers = Answers(
            model=typer.prompt("Model: a Hugging Face directory or hub name", answers.model),
            rows=typer.prompt(f"Rows: a file or dataset of yours, or {EXAMPLES}", answers.rows),
            reward=_asked(f"Reward: {OWN} function, or a built-in one", answers.reward, ROWS),
            longest=_asked("Longest response in tokens", answers.longest, None),
            device=_asked("Learner on", answers.device, ("cpu", "gpu")),
        )
    for path in write_task(directory, answers):
        typer.echo(f"wrote {path}")
    _validate(file, [], asks_hub=False)


def _asked(question: str, default: Any, allowed: Collection[str] | None) -> Any:
    """Ask until the answer is one of `allowed`, or without these a whole number from 1 on."""

    def value(text: Any) -> Any:
        if allowed is None and str(text).isdecimal() and int(text) > 0:
            return int(text)
        if allowed is not None and text in allowed:
            return text
        one_of = "a whole number from 1 on" if allowed is None else ", ".join(allowed)
        raise typer.BadParameter(f"found {text}; allowed is {one_of}")

    return typer.prompt(question, default, value_proc=value)


@app.command()
def validate(words: Words = None, config: ConfigOption = None) -> None:
    """Check a config and report all mistakes together, without loading a model."""
    _validate(*required_config(words, config), asks_hub=True)


def _validate(file: Path, overrides: list[str], *, asks_hub: bool) -> None:
    from asyncrl.config.named_files import is_stage
    from asyncrl.preflight.doubts import doubts
    from asyncrl.preflight.validate import validated_config
    from asyncrl.stages.rows import read_rows
    from asyncrl.stages.settings import validated_stage

    if is_stage(file):
        read_rows(validated_stage(file, overrides))
        typer.echo(f"{file}: fine")
        return
    found = validated_config(file, overrides, resumes=True, asks_hub=asks_hub, on_hosts=True)
    for doubt in doubts(found, file, overrides):
        typer.echo(f"! {doubt}")
    for source, share in zip(found.data.train, found.data.shares, strict=True):
        if share != 1:
            typer.echo(f"data.train: {float(share):.1%} of the tickets from {source.path}, `{source.label}`")
    typer.echo(f"{named(file)}: fine")


@app.command()
def doctor(words: Words = None, config: ConfigOption = None, as_json: Json = False) -> None:
    """Check this machine, and what a run needs of it; failures come with their fix and exit status 1."""
    from rich.console import Console
    from rich.text import Text

    from asyncrl.cli.screens import show_outcome
    from asyncrl.preflight.doctor import examine, summary, to_values

    console, outcomes = Console(highlight=False), []
    given: tuple[Path | None, list[str]] = required_config(words, config) if words or config else (None, [])
    for outcome in examine(*given):
        found = replace(outcome.finding, found=named(outcome.finding.found))
        outcomes.append(replace(outcome, finding=found))
        if not as_json:
            show_outcome(outcomes[-1], console)
    if as_json:
        typer.echo(json.dumps([to_values(outcome) for outcome in outcomes], indent=1))
    else:
        console.print(Text(summary(outcomes), "bold"), soft_wrap=True)
    if any(outcome.finding.verdict == "failed" for outcome in outcomes):
        raise typer.Exit(1)


@app.command()
def plan(words: Words = None, config: ConfigOption = None, as_json: Json = False) -> None:
    """Show what a config asks of this machine (batches, staleness, store, memory), with all formulas."""
    from asyncrl.cli.screens import show_plan
    from asyncrl.preflight.fit import plan_of

    found = plan_of(*required_config(words, config))
    if as_json:
        values = {"lines": [asdict(line) for line in found.lines], "warnings": found.warnings}
        typer.echo(json.dumps(values, indent=1))
    else:
        show_plan(found)


@reward.command("test")
def reward_test(
    words: Words = None,
    config: ConfigOption = None,
    count: Annotated[int, typer.Option("--n", min=1, help="Prompts of the data, or samples.")] = 8,
    samples: Annotated[
        Path | None,
        typer.Option(help="Run directory, or JSONL with `response` and columns; default: wrong answers."),
    ] = None,
) -> None:
    """Score reference and wrong answers, or samples, as a run would. The exit status is 1 if one failed."""
    from asyncrl.cli.screens import show_trial
    from asyncrl.preflight.reward_trial import try_rewards

    trial = try_rewards(*required_config(words, config), count=count, samples=samples)
    show_trial(trial)
    if trial.unscored or any(part.failures for part in trial.parts):
        raise typer.Exit(1)


@environment.command("test")
def environment_test(
    target: Annotated[
        str, typer.Argument(metavar="FILE[:NAME]", help="As in `environment.uses`; or a file with one class.")
    ],
    row: Annotated[str, typer.Option(help="Columns of the dataset row, as a JSON object.")] = "{}",
    prompt: Annotated[str, typer.Option(help="The row's prompt.")] = "",
    answer: Annotated[list[str] | None, typer.Option(help="An answer of the model; may be repeated.")] = None,
    python: Annotated[Path | None, typer.Option(help="As `environment.python`.")] = None,
    step_s: Annotated[float, typer.Option(min=0.1, help="As `environment.step_s`.")] = 10.0,
) -> None:
    """Start an environment as a run would, begin it twice, and play an episode with scripted answers.

    The exit status is 1 if it failed.
    """
    from asyncrl.cli.screens import show_environment
    from asyncrl.preflight.environment_trial import try_environment

    try:
        columns = json.loads(row)
    except ValueError as error:
        raise typer.BadParameter(f"found {row}, which is not JSON: {error}", param_hint="--row") from error
    if not isinstance(columns, dict):
        raise typer.BadParameter(f"found {row}; a JSON object is allowed", param_hint="--row")
    settings = {"python": python, "step_s": step_s}
    trial = try_environment(target, settings, row=columns, prompt=prompt, answers=answer or [])
    show_environment(trial)
    if trial.problem:
        raise typer.Exit(1)


@app.command()
def dataset(
    name: Annotated[
        str,
        typer.Argument(help="`reasoning_gym:NAME` or `verifiers:TASKSET`, with options as `?option=value`."),
    ],
    size: Annotated[int, typer.Option(min=1, help="Most rows.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the tasks, or of their order.")] = 0,
    python: Annotated[
        Path | None, typer.Option(help="Python interpreter that has the library; by default this one.")
    ] = None,
) -> None:
    """Print tasks of a library as JSON lines, for `data.train` and `data.eval`."""
    from asyncrl.environments.named import dataset_rows

    for row in dataset_rows(name, size=size, seed=seed, python=python):
        typer.echo(row)


@app.command()
def play(
    words: Words = None,
    config: ConfigOption = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows, one episode each.")] = 3,
) -> None:
    """Play episodes of the first rows, and show every turn with its ids, what is trained, and the reward."""
    from asyncrl.results.play import play_rows

    for line in play_rows(*required_config(words, config), rows):
        typer.echo(line)
