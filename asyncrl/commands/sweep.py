"""`asyncrl sweep`: the runs of all combinations of values and seeds."""

import hashlib
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from asyncrl.config.load import load_config
from asyncrl.config.named_files import is_stage
from asyncrl.errors import ConfigError
from asyncrl.run.directory import RunDirectory

NAME_CHARACTERS = 64  # of `run.name`
OWN_KEYS = ("run.name", "run.root")  # they say where the runs of the sweep are
RETURN_EARLY = ("kubernetes", "slurm")  # kinds of cluster with which `up` does not wait for the run's end


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of a sweep."""

    directory: RunDirectory
    values: str
    """What it has in place of the values of other trials, apart from the seed."""
    overrides: list[str]


def swept(file: Path, overrides: Sequence[str], seeds: int) -> list[Trial]:
    """Return the runs of a sweep in order, the seeds of a combination together. Raises ConfigError."""
    if is_stage(file):
        raise ConfigError(f"sweep: {file} is the config of a stage; give that of a run, or `asyncrl stage`")
    columns = [_column(text) for text in overrides]
    several = {column[0].partition("=")[0] for column in columns if len(column) > 1}
    if found := sorted(several.intersection(OWN_KEYS)):
        raise ConfigError(f"sweep: found several values of {found[0]}, which it sets itself; give one")
    if seeds > 1 and "run.seed" in several:
        raise ConfigError("sweep: found several values of run.seed and --seeds; leave one of them out")
    trials = list[Trial]()
    for chosen in itertools.product(*columns):
        base = load_config(file, chosen)
        if base.cluster.kind in RETURN_EARLY:
            cure = "start the runs by `asyncrl up`, and compare them by `asyncrl compare`"
            raise ConfigError(f"sweep: cluster.kind is {base.cluster.kind}, which waits for no run; {cure}")
        values = [text for text in chosen if text.partition("=")[0] in several]
        for seed in range(base.run.seed, base.run.seed + seeds):
            own = [f"run.seed={seed}"] * (seeds > 1)
            name = _name(base.run.name, [*values, *own])
            directory = RunDirectory(base.run.root / name)
            trials.append(Trial(directory, " ".join(values), [*chosen, *own, f"run.name={name}"]))
    if len(trials) < 2:
        raise ConfigError("sweep: found no key with several values; give KEY=A,B, or --seeds 3")
    paths = [trial.directory.path for trial in trials]
    if twice := [str(path) for path in paths if paths.count(path) > 1]:
        raise ConfigError(f"sweep: two runs would have the directory {twice[0]}; give values that differ")
    return trials


def page_of(trials: Sequence[Trial]) -> Path:
    """Return the place of the page that compares all runs."""
    paths = [trial.directory.path for trial in trials]
    shared = os.path.commonprefix([path.name for path in paths]).rstrip("-._")  # noqa: RUF071 - characters
    return paths[0].with_name(f"{shared}-sweep.html")


def _column(override: str) -> list[str]:
    """Return an override for each value of a list `A,B`; commas in brackets and quotes divide nothing."""
    key, _, text = override.partition("=")
    try:
        # Only places are read. In brackets PyYAML would end a text at `?`, which begins options of adapters.
        found = yaml.compose(f"[{text.replace('?', '_')}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError:  # the config reports it
        return [override]
    ends = [(one.start_mark.index - 1, one.end_mark.index - 1) for one in (found.value if found else ())]
    return [f"{key}={text[begin:end].strip()}" for begin, end in ends] or [override]


def _name(base: str, values: Sequence[str]) -> str:
    """Return a name of a run that holds each key and its value, or a digest of what it cannot hold."""
    full = "-".join([base, *values]).replace("=", "-")
    whole = re.sub(r"[^A-Za-z0-9._-]+", "_", full)
    if whole == full and len(whole) <= NAME_CHARACTERS:
        return whole
    digest = hashlib.sha256(full.encode()).hexdigest()[:8]
    return f"{whole[: NAME_CHARACTERS - len(digest) - 1]}-{digest}"
