"""`asyncrl validate`: checks everything about a config that can be known without a model, and reports all
mistakes together."""

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
    """The config, after checking its files, functions and sandbox here. Raises ConfigError with every mistake
    and its line.

    With `resumes`, the config is also compared with the run that it would resume, if there is one.
    """
    draft = read_draft(path, overrides)
    if draft.config:
        config, root = draft.config, draft.root
        found = [*file_problems(config), *source_problems(config, root), *row_problems(config)]
        sandbox = sandbox_of(config.reward, config.run.root)
        if sandbox and (problem := sandbox.problem()):
            found.append(Mistake(("reward.sandbox",), problem))
        if resumes:
            reported = {mistake.keys for mistake in found}  # for example a missing file
            found += [one for one in _resume_problems(path, config, root) if one.keys not in reported]
        for mistake in found:
            draft.add(mistake)
    return checked(draft)


def _resume_problems(path: Path, config: Config, root: Node) -> list[Mistake]:
    if path.name != "config.yaml" and not config.run.directory.exists():
        return []
    # Heavy libraries, which a first run need not load.
    from asyncrl.run.directory import RunDirectory
    from asyncrl.run.saved import changes, moved, read_saved

    saved = read_saved(RunDirectory(config.run.directory))
    return list(moved(path, config, root)) or list(changes(config, saved, DataFiles(config.data)))
