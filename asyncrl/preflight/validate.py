"""A config with everything checked that can be known without loading a model, and every mistake of it told at once."""

from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.base import Mistake
from asyncrl.config.document import Node
from asyncrl.config.load import checked, read_draft
from asyncrl.config.named_files import file_problems
from asyncrl.config.schema import Config
from asyncrl.data.dataset import DataFiles
from asyncrl.preflight.rows import row_problems
from asyncrl.preflight.sources import source_problems
from asyncrl.rewards.sandbox import sandbox_of


def validated_config(path: Path, overrides: Sequence[str] = (), *, resumes: bool = False) -> Config:
    """The config, its files and functions looked at on this host. Raises ConfigError with every problem and its line.

    With `resumes` also compared with the run that is there already, if one is.
    """
    draft = read_draft(path, overrides)
    found = _problems(draft.config, draft.root) if draft.config else []
    if draft.config and resumes:
        told = {mistake.keys for mistake in found}  # such as a file that is not there
        found += [one for one in _resume_problems(path, draft.config, draft.root) if one.keys not in told]
    for mistake in found:
        draft.add(mistake)
    return checked(draft)


def _problems(config: Config, root: Node) -> list[Mistake]:
    """Of files, functions and rows, and of the sandbox, which is tried out."""
    found = [*file_problems(config), *source_problems(config, root), *row_problems(config)]
    sandbox = sandbox_of(config.reward, config.run.root)
    if sandbox and (problem := sandbox.problem()):
        found.append(Mistake(("reward.sandbox",), problem))
    return found


def _resume_problems(path: Path, config: Config, root: Node) -> list[Mistake]:
    if path.name != "config.yaml" and not config.run.directory.exists():
        return []
    # These load heavy libraries, for which a first run need not wait.
    from asyncrl.run.directory import RunDirectory
    from asyncrl.run.saved import changes, moved, read_saved

    saved = read_saved(RunDirectory(config.run.directory))
    return list(moved(path, config, root)) or list(changes(config, saved, DataFiles(config.data)))
