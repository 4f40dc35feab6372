"""Python interface: start a run, watch it, read its results. The commands do the same in a shell.

    import asyncrl

    run = asyncrl.start("task.yaml", "learner.steps=200")
    run.wait()
    print(run.metrics()[200]["reward/mean"])

Rows and a reward function of a notebook need no file of their own:

    asyncrl.train("learner.steps=200", model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, reward=function)

A run has its own processes. It goes on when the Python process ends, and `asyncrl.open` finds it again.
"""

import os
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from asyncrl.cluster.slurm import allocation
from asyncrl.commands.down import end_run
from asyncrl.commands.sweep import RETURN_EARLY
from asyncrl.config.load import read_draft
from asyncrl.config.resolved import dump_config, dump_values
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.hosting.processes import module_argv
from asyncrl.preflight.validate import validated_config
from asyncrl.results.export import export_model
from asyncrl.results.recorded import Wanted, choose, recorded_samples
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.run.given import Rows, importable, write_reward, write_rows
from asyncrl.run.saved import nothing_left, read_saved
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.history import numbers
from asyncrl.telemetry.jsonl import Tail
from asyncrl.telemetry.state import LEARNER, read_state
from asyncrl.telemetry.status import StatusSnapshot, read_status

# A YAML file, its content as a dictionary, or a checked config; None has no keys.
ConfigSource = Path | str | Mapping[str, Any] | Config | None
# A function, the name of one, an entry of `reward.functions`, or a list of these.
Reward = Callable[..., Any] | str | Mapping[str, Any] | Sequence[Callable[..., Any] | str | Mapping[str, Any]]
OnStep = Callable[[int, dict[str, float]], object]
_OUTPUT_CHARACTERS = 2000  # characters of a failed run's output that its error quotes
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended."""

    directory: Path
    is_finished: bool
    """False if the run was stopped before its last step. The same call of `start` resumes it."""
    step: int
    """The last trained step."""


class Run:
    """A run that is up or over. `start` and `open` return one."""

    def __init__(self, directory: RunDirectory, process: "_Process | None" = None) -> None:
        """Use the run in `directory`, also after a chdir. `process` is its supervisor, if we started it."""
        self._directory, self._process = RunDirectory(directory.path.absolute()), process
        self._lines = Tail(self._directory.metrics / f"{LEARNER}.jsonl", last_bytes=0)
        self._reported = 0  # the last step of which `wait` has told

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._directory.path

    @property
    def is_up(self) -> bool:
        """Whether the processes of the run are running or starting."""
        return self._process.poll() is None if self._process else self._directory.is_up

    def wait(self, timeout_s: float | None = None, *, on_step: OnStep | None = None) -> Result:
        """Wait until the run is over. Raises RunError if it has failed, TimeoutError after `timeout_s`.

        `on_step(step, metrics)` is called in this process once for each step that ends after `start` or
        `open`, also if a restart trains it again. What is known later, such as an evaluation, is in
        `metrics()`. What `on_step` raises is raised here, and the run goes on.
        """
        until_s = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        is_up = True
        while is_up:
            is_up = self.is_up  # before the lines are read, so that the last ones are among them
            if on_step:
                self._report(on_step)
            if is_up and time.monotonic() > until_s:
                raise TimeoutError(f"{self.directory}: the run is not over after {timeout_s} s; it goes on")
            time.sleep(_POLL_S if is_up else 0)
        status = self.status()
        if self._process and (message := self._process.failure()):
            raise RunError(message)
        # A supervisor that was killed has written no last state, also if a stop took too long; before its
        # learner had loaded, there is none at all.
        has_ended = (status and status.is_final) or self._directory.stopping.exists()
        is_lost = not has_ended and (status or self._directory.was_up)
        if not self._process and (is_lost or (status and status.state == "failed")):
            message = status.message if status else ""
            raise RunError(f"{self.directory}: {message or 'the run failed; see its logs'}")
        finished = status is not None and status.state == "finished"
        return Result(directory=self.directory, is_finished=finished, step=status.step if status else 0)

    def _report(self, on_step: OnStep) -> None:
        for record in self._lines:
            row = {name: value for name, value in numbers(record).items() if name != "time"}
            step = int(row.pop("step", 0))
            if "time/step" in row and step > self._reported:
                self._reported = step
                on_step(step, row)

    def stop(self) -> Result:
        """Save, stop all processes of the run, and wait until they have ended."""
        if self._process:
            self._process.terminate()  # `end_run` cannot find a supervisor that has just been started
        end_run(self._directory)
        return self.wait()

    def status(self) -> StatusSnapshot | None:
        """Return the learner's status, at most a second old while the run is up; None before the first."""
        return read_status(self._directory.status)

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return all learner metrics by step, for `pandas.DataFrame.from_dict(..., orient="index")`."""
        return dict(sorted(read_state(self.directory).history.rows.items()))

    def samples(
        self,
        count: int = 5,
        *,
        step: int | None = None,
        kind: Literal["train", "eval", "dropped"] | None = None,
        order: Literal["newest", "best", "worst"] = "newest",
    ) -> list[SampleRecord]:
        """Return recorded rollouts, with rewards, advantages and policy versions.

        With `kind` "eval" they are those of one evaluation, which keeps all: of `step`, or of the newest.
        Without it the best and the worst are those of training, because held-out ones have other rewards.
        """
        wanted = Wanted(count=count, step=step, kind=kind, order=order)
        return choose(recorded_samples(self._directory, wanted), wanted)[0]

    def evaluate(self, *overrides: str) -> dict[str, float]:
        """Start an engine and return held-out metrics of the newest checkpoint. Raises RunError."""
        from asyncrl.results.evaluate import evaluate_model  # imports torch and transformers

        return evaluate_model(str(self.directory), None, overrides)

    def export(self, to: Path | str, *, merge: bool = False) -> Path:
        """Copy the newest checkpoint as a Hugging Face model directory with a model card. Raises RunError.

        With `merge`, an adapter is added to the weights of its model.
        """
        export_model(self._directory, Path(to), merge=merge)
        return Path(to)


def train(
    config: ConfigSource = None,
    *overrides: str,
    model: Path | str | None = None,
    data: Path | str | Rows | None = None,
    reward: Reward | None = None,
    on_step: OnStep | None = None,
    fresh: bool = False,
) -> Result:
    """Call `start` and `Run.wait`. Ctrl-C, and what `on_step` raises, saves and stops the run."""
    run = start(config, *overrides, model=model, data=data, reward=reward, fresh=fresh)
    try:
        return run.wait(on_step=on_step)
    except (KeyboardInterrupt, Exception):
        if run.is_up:
            run.stop()
        raise


def start(
    config: ConfigSource = None,
    *overrides: str,
    model: Path | str | None = None,
    data: Path | str | Rows | None = None,
    reward: Reward | None = None,
    fresh: bool = False,
) -> Run:
    """Start or resume a run on this machine, as `asyncrl up` does, and return when its supervisor is up.

    Args:
        config: a YAML file, or its content as a dictionary or `Config`; None if other arguments say all.
        overrides: `key=value`, such as `learner.steps=200`. Of two values for a key, the later one counts.
        model: `model.path`.
        data: `data.train`, or the rows themselves: a list of dictionaries, or a `datasets.Dataset`.
        reward: `reward.functions`, where a function may stand for its name. One that no other process can
            import, such as one of a notebook, is pickled with what it uses, and rows are written as JSON.
            Both go into the run directory, where a resume finds them without this process.
        fresh: delete the files of an earlier run of this name.

    Raises:
        ConfigError: the config has mistakes; the message lists all of them.
        RunError: the run is up, or its supervisor could not start: the message is the end of its output.
    """
    if isinstance(config, str) and "=" in config and not os.path.isfile(config):
        overrides, config = (config, *overrides), None
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as scratch:
        path = _as_file({"run": {"name": "first"}} if config is None else config, Path(scratch))
        if found := read_draft(Config, path, overrides).config:
            given = _given(RunDirectory(found.run.directory), model, data, reward)
            overrides = (*given, *overrides)
        checked = validated_config(path, overrides, resumes=not fresh, on_hosts=True)
        kind, directory = checked.cluster.kind, RunDirectory(checked.run.directory)
        if kind in RETURN_EARLY and not (kind == "slurm" and allocation()):
            raise ConfigError(f"cluster.kind: found {kind}, which waits for no run; call `asyncrl up`")
        if directory.is_up:
            raise RunError(f"run {directory.path} is up; `asyncrl.open` returns it. Or set another run.name")
        if not fresh and (reason := nothing_left(checked, directory, read_saved(directory))):
            warnings.warn(reason, stacklevel=3)  # where `train` was called
        # The process gets a copy of the config, because `scratch` ends with this call.
        process = _Process(dump_config(checked), ["--fresh"] if fresh else [])
    try:
        while process.poll() is None and not directory.is_up:
            time.sleep(_POLL_S)
    except BaseException:
        process.terminate()  # nobody else knows of it
        raise
    if message := process.failure():
        raise RunError(message)
    return Run(directory, process)


def _given(
    directory: RunDirectory, model: Path | str | None, data: Path | str | Rows | None, reward: Reward | None
) -> list[str]:
    """Write rows and functions into the run directory; return overrides that name them."""

    def named(entry: Any) -> Any:
        if isinstance(entry, Mapping):
            return {**entry, "function": named(entry["function"])} if "function" in entry else {**entry}
        return entry if isinstance(entry, str) else importable(entry) or write_reward(entry, directory)

    given: dict[str, Any] = {}
    if model is not None:
        given["model.path"] = model
    if data is not None:
        given["data.train"] = data if isinstance(data, str | Path) else write_rows(data, directory)
    if reward is not None:
        entries = reward if isinstance(reward, list | tuple) else [reward]
        given["reward.functions"] = [named(entry) for entry in entries]
    return [f"{key}={dump_values(_plain(value, key), in_a_line=True)}" for key, value in given.items()]


def open(run: Path | str | None = None) -> Run:
    """Return an existing run, by its directory or name; by default the newest one. Raises RunError."""
    return Run(find_run(Path(run) if run is not None else None))


class _Process(subprocess.Popen[bytes]):
    """The supervisor, in its own session, so that neither Ctrl-C nor the end of this process stops it."""

    def __init__(self, config: str, options: Sequence[str]) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="asyncrl-up-", ignore_cleanup_errors=True)
        path, self._output = Path(self._home.name) / "config.yml", Path(self._home.name) / "output"
        path.write_text(config, encoding="utf-8")
        with self._output.open("wb") as output:
            command = module_argv("asyncrl.cli.main", "up", str(path), "--plain", *options)
            super().__init__(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def failure(self) -> str:
        """Return how it has failed, with the end of its output; empty if it is up, over or was stopped."""
        status, stops = self.poll(), (signal.SIGTERM, signal.SIGINT)
        # A signal that comes before there is anything to save ends it without its own exit status.
        if status in (None, 0, *(128 + stop for stop in stops), *(-stop for stop in stops)):
            return ""
        output = self._output.read_text(encoding="utf-8", errors="replace")[-_OUTPUT_CHARACTERS:]
        return output or f"`asyncrl up` ended with status {status} and no output; try it in a shell"


def _as_file(config: ConfigSource, scratch: Path) -> Path:
    """Return a YAML file with the content of `config`."""
    if isinstance(config, str | Path):
        return Path(config)
    if isinstance(config, Config):
        text = dump_config(config)
    else:
        values = _plain(config, "config")
        if extended := values.get("extends"):
            files = [extended] if isinstance(extended, str) else extended
            # A preset of the package has its name, not a path from here.
            values["extends"] = [os.path.abspath(file) if os.path.exists(file) else file for file in files]
        text = dump_values(values)
    path = scratch / "config.yml"
    path.write_text(text, encoding="utf-8")
    return path


def _plain(value: Any, where: str) -> Any:
    """Return a value that YAML can hold: functions and classes by name, paths as text, NumPy's numbers."""
    if isinstance(value, Enum):
        return _plain(value.value, where)
    if isinstance(value, Mapping):
        return {(name := str(_plain(key, where))): _plain(value[key], f"{where}.{name}") for key in value}
    if isinstance(value, list | tuple):
        return [_plain(entry, where) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # a number or an array of NumPy
        return value.tolist()
    if callable(value) and (value := importable(function := value)) is None:
        raise ConfigError(
            f"{function!r} is known in this Python process only, and a run has others; give a reward as "
            '`reward=`, or write the function into a file and name it "path.py:function"'
        )
    if value is not None and type(value) not in (str, int, float, bool, date, datetime):
        found = f"found {type(value).__name__} `{str(value)[:80]}`"
        raise ConfigError(f"{where}: {found}; allowed are texts, numbers, dates, lists and dicts; convert it")
    return value
