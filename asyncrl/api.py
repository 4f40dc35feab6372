"""Python interface: start a run, watch it, read its results. The commands do the same in a shell.

    import asyncrl

    run = asyncrl.start("task.yaml", "learner.steps=200")
    run.wait()
    print(run.metrics()[200]["reward/mean"])

A run has its own processes. It goes on when the Python process ends, and `asyncrl.open` finds it again.
"""

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
from asyncrl.hosting.processes import module_argv
from asyncrl.preflight.validate import validated_config
from asyncrl.results.archive import read_history
from asyncrl.results.export import export_model
from asyncrl.results.samples import Wanted, recorded
from asyncrl.run.directory import RunDirectory, find_run
from asyncrl.telemetry.base import SampleRecord
from asyncrl.telemetry.status import StatusSnapshot, read_status

# A YAML file, its content as a dictionary (where a reward may be a function), or a checked config.
ConfigSource = Path | str | Mapping[str, Any] | Config
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
        """Use the run in `directory`. `process` is its supervisor, if this Python process started it."""
        self._directory, self._process = directory, process

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._directory.path

    @property
    def is_up(self) -> bool:
        """Whether the processes of the run are running or starting."""
        return self._process.is_alive if self._process else is_up(self._directory)

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait until the run is over. Raises RunError if it has failed, TimeoutError after `timeout_s`."""
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
        return dict(read_history(self._directory)[0].rows)

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
        """
        wanted = Wanted(count=count, step=step, kind=kind, order=order)
        return wanted.choose(recorded(self._directory, wanted))

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


def train(config: ConfigSource, *overrides: str, fresh: bool = False) -> Result:
    """Call `start` and `Run.wait`; Ctrl-C saves and stops the run."""
    run = start(config, *overrides, fresh=fresh)
    try:
        return run.wait()
    except KeyboardInterrupt:
        run.stop()
        raise


def start(config: ConfigSource, *overrides: str, fresh: bool = False) -> Run:
    """Start or resume a run on this machine, as `asyncrl up` does, and return immediately.

    Args:
        config: a YAML file, or its content as a dictionary or `Config`.
        overrides: `key=value`, such as `learner.steps=200`. Of two values for a key, the later one counts.
        fresh: delete the files of an earlier run of this name.

    Raises:
        ConfigError: the config has mistakes; the message lists all of them.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as scratch:
        path = _as_file(config, Path(scratch))
        checked = validated_config(path, overrides, resumes=not fresh)
        # The process gets a copy of the config, because `scratch` ends with this call.
        process = _Process(dump_config(checked), ["--fresh"] if fresh else [])
    return Run(RunDirectory(checked.run.directory), process)


def open(run: Path | str | None = None) -> Run:
    """Return an existing run, by its directory or name; by default the newest one. Raises RunError."""
    return Run(find_run(Path(run) if run is not None else None))


class _Process:
    """The supervisor, in its own session, so that neither Ctrl-C nor the end of this process stops it."""

    def __init__(self, config: str, options: Sequence[str]) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="asyncrl-up-", ignore_cleanup_errors=True)
        path, self._output = Path(self._home.name) / "config.yml", Path(self._home.name) / "output"
        path.write_text(config, encoding="utf-8")
        with self._output.open("wb") as output:
            command = module_argv("asyncrl.cli.main", "up", str(path), "--plain", *options)
            self._popen = subprocess.Popen(
                command,
                env=os.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def terminate(self) -> None:
        self._popen.terminate()

    def failure(self) -> str:
        """Return the end of its output if it has failed; empty if it finished or was stopped."""
        if self._popen.returncode in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT):
            return ""
        return self._output.read_text(encoding="utf-8", errors="replace")[-_OUTPUT_CHARACTERS:]


def _as_file(config: ConfigSource, scratch: Path) -> Path:
    """Return a YAML file with the content of `config`."""
    if isinstance(config, str | Path):
        return Path(config)
    if isinstance(config, Config):
        text = dump_config(config)
    else:
        values = _plain(config)
        if extended := values.get("extends"):
            files = [extended] if isinstance(extended, str) else extended
            values["extends"] = [str(Path(file).absolute()) for file in files]
        text = yaml.safe_dump(values, sort_keys=False)
    path = scratch / "config.yml"
    path.write_text(text, encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    """Return a value that YAML can hold: functions and classes by name, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    return _name_of(value) if callable(value) else value


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name by which other processes find a function. Raises ConfigError if they cannot."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if not name or "<" in name or "." in name or module is None or file is None:
        raise ConfigError(
            f"{function!r} is known in this Python process only, and a run has others; write it into a file "
            'and name it "path.py:function", or import it from a module'
        )
    return f"{Path(file).absolute()}:{name}" if module.__name__ == "__main__" else f"{module.__name__}:{name}"
