"""Runs from Python: start one, watch it, read what it left. The commands do the same in a shell.

    import asyncrl

    run = asyncrl.start("task.yaml", "learner.steps=200")
    run.wait()
    print(run.metrics()[200]["reward/mean"])

A run lives in processes of its own. It goes on when the Python process ends, and `asyncrl.open` finds it again.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from asyncrl.commands.down import end_run
from asyncrl.commands.inspect import is_up
from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.preflight.validate import validated_config
from asyncrl.results.archive import learner_records, read_samples
from asyncrl.results.export import export_model
from asyncrl.results.samples import Wanted
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.history import History
from asyncrl.telemetry.status import StatusSnapshot, read_status

# A YAML file, the same as a dictionary, or a checked config. In a dictionary a reward may be the function
# itself.
ConfigSource = Path | str | Mapping[str, Any] | Config
_LAST_WORDS = 2000  # characters of a failed run's output that its error quotes
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended."""

    directory: Path
    is_finished: bool
    """False: it was stopped before its last step. The same command resumes it."""
    step: int
    """The last trained step."""


class Run:
    """One run, which may be up or over."""

    def __init__(self, directory: RunDirectory, process: "_Process | None" = None) -> None:
        """See `start` and `open`. `process` is the supervisor, if this Python process started it."""
        self._directory, self._process = directory, process

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return self._directory.path

    @property
    def is_up(self) -> bool:
        """Whether its processes run, or are being started."""
        return self._process.is_alive if self._process else is_up(self._directory)

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait until the run is over.

        Raises TimeoutError after `timeout_s`: the run goes on. Raises RunError when it failed, with its last words.
        """
        until_s = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while self.is_up:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self.directory}: the run is not over after {timeout_s} s; it goes on")
            time.sleep(_POLL_S)
        status = self.status()
        if self._process and (message := self._process.failure()):
            raise RunError(message)
        if not self._process and status and status.state == "failed":
            raise RunError(f"{self.directory}: {status.message or 'the run failed; see its logs'}")
        finished = status is not None and status.state == "finished"
        return Result(directory=self.directory, is_finished=finished, step=status.step if status else 0)

    def stop(self) -> Result:
        """Save, stop all processes of the run, and wait until none is left."""
        if self._process:
            self._process.terminate()  # it may not have got as far as to be found in the run directory
        end_run(self._directory)
        return self.wait()

    def status(self) -> StatusSnapshot | None:
        """What the learner said last, at most a second ago while it is up. None before its first word."""
        return read_status(self._directory.status)

    def metrics(self) -> dict[int, dict[str, float]]:
        """All learner metrics by step. `pandas.DataFrame.from_dict(run.metrics(), orient="index")` makes a table of them."""
        history = History()
        for record in learner_records(self._directory):
            history.add(record)
        return dict(history.rows)

    def samples(
        self,
        count: int = 5,
        *,
        step: int | None = None,
        kind: Literal["train", "eval", "dropped"] | None = None,
        order: Literal["newest", "best", "worst"] = "newest",
    ) -> list[SampleRecord]:
        """Rollouts that the run wrote down, with rewards, advantages and versions."""
        return Wanted(count=count, step=step, kind=kind, order=order).choose(read_samples(self._directory.samples))

    def evaluate(self, *overrides: str) -> dict[str, float]:
        """Held-out metrics of the newest checkpoint. Starts an engine, in a process of its own. Raises RunError."""
        command = [*_ASYNCRL, "eval", str(self.directory), *overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(done.stderr[-_LAST_WORDS:])
        metrics: dict[str, float] = json.loads(done.stdout[done.stdout.index("{") :])
        return metrics

    def export(self, to: Path | str) -> Path:
        """Copy the newest checkpoint as a Hugging Face model directory with a model card; returns that. Raises RunError."""
        export_model(self._directory, Path(to))
        return Path(to)


_ASYNCRL = (sys.executable, "-m", "asyncrl.cli.main")


def train(config: ConfigSource, *overrides: str, fresh: bool = False) -> Result:
    """Start a run and wait until it is over; Ctrl-C stops it in good order. See `start` and `Run.wait`."""
    run = start(config, *overrides, fresh=fresh)
    try:
        return run.wait()
    except KeyboardInterrupt:
        run.stop()
        raise


def start(config: ConfigSource, *overrides: str, fresh: bool = False) -> Run:
    """Begin or resume a run on this machine, as `asyncrl up` does, and return at once.

    Args:
        config: a YAML file, or what would stand in it.
        overrides: `key=value`, such as `learner.steps=200`; the later of two wins.
        fresh: throw away what an earlier run of this name left.

    Raises:
        ConfigError: with every mistake of the config.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as scratch:
        path = _as_file(config, Path(scratch))
        checked = validated_config(path, overrides, resumes=not fresh)
        # The process gets a config of its own, so that nothing has to outlive this call.
        process = _Process(dump_config(checked), ["--fresh"] if fresh else [])
    return Run(RunDirectory(checked.run.directory), process)


def open(run: Path | str | None = None) -> Run:
    """A run that exists, by its directory or name; the newest one by default. Raises RunError when there is none."""
    return Run(find_run(Path(run) if run is not None else None))


class _Process:
    """The supervisor, in a session of its own: neither Ctrl-C nor the end of this process reaches it."""

    def __init__(self, config: str, options: Sequence[str]) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="asyncrl-up-", ignore_cleanup_errors=True)
        path, self._output = Path(self._home.name) / "config.yml", Path(self._home.name) / "output"
        path.write_text(config, encoding="utf-8")
        with self._output.open("wb") as output:
            command = [*_ASYNCRL, "up", str(path), "--plain", *options]
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=os.environ
            )

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def terminate(self) -> None:
        self._popen.terminate()

    def failure(self) -> str:
        """Its last words, where it neither finished nor was stopped; else empty."""
        if self._popen.returncode in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT):
            return ""
        return self._output.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]


def _as_file(config: ConfigSource, scratch: Path) -> Path:
    """A YAML file that says what `config` says."""
    if isinstance(config, str | Path):
        return Path(config)
    path = scratch / "config.yml"
    if isinstance(config, Config):
        path.write_text(dump_config(config), encoding="utf-8")
        return path
    values = _plain(config)
    if extended := values.get("extends"):
        files = [extended] if isinstance(extended, str) else extended
        values["extends"] = [str(Path(file).absolute()) for file in files]
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    """What YAML can hold: functions and classes by name, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    return _name_of(value) if callable(value) else value


def _name_of(function: Callable[..., Any]) -> str:
    """How another process finds it. Raises ConfigError for one that only this process has."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if not name or "<" in name or "." in name or module is None or file is None:
        raise ConfigError(
            f"{function!r} is known in this Python process only, and a run lives in others; write it into a file and name it "
            '"path.py:function", or import it from a module'
        )
    return f"{Path(file).absolute()}:{name}" if module.__name__ == "__main__" else f"{module.__name__}:{name}"
