"""`asyncrl validate`: finds every mistake of a config that shows without a model or running user code."""

from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.base import Mistake
from asyncrl.config.document import Node
from asyncrl.config.load import checked, read_draft
from asyncrl.config.named_files import file_problems, is_stage, too_long
from asyncrl.config.schema import Config
from asyncrl.data.data_files import DataFiles
from asyncrl.errors import ConfigError
from asyncrl.hosting.gpus import count_gpus, has_instances, is_elsewhere
from asyncrl.hosting.placement import misplaced
from asyncrl.preflight.architectures import architecture_problems, model_problems, teacher_problems
from asyncrl.preflight.definitions import function_problems
from asyncrl.preflight.outside import absent_names, outside_problems
from asyncrl.preflight.row_problems import row_problems
from asyncrl.rewards.reward_process import reward_sandbox


def validated_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    resumes: bool = False,
    generators: bool = True,
    asks_hub: bool = False,
    on_hosts: bool = False,
) -> Config:
    """Return the config after checking its files, functions, rows, sandbox and GPUs on this machine.

    With `resumes`, the config is also compared with the run that it would resume, if there is one. Without
    `generators`, and with `cluster.kind`, these are on other machines. With `asks_hub`, the hub is
    asked for models and datasets, if nothing else is wrong. With `on_hosts`, GPUs and sandbox of this
    machine are checked only if it may be one of the hosts of `cluster.kind`.

    Raises:
        ConfigError: its text lists every mistake with its line.
    """
    if is_stage(path):
        raise ConfigError(f"{path} is the config of a stage; `asyncrl stage {path}` trains it")
    draft = read_draft(Config, path, overrides)
    if draft.config:
        kind = draft.config.cluster.kind
        try:
            here = {"generators": generators, "is_here": not (on_hosts and is_elsewhere(kind))}
            found = _problems(path, draft.config, draft.root, resumes=resumes, **here)
        except OSError as error:
            found = [too_long(error, draft.root)]
        for mistake in found:
            draft.add(mistake)
        asks_hub = asks_hub and kind != "kubernetes" and not draft.problems
        for mistake in absent_names(draft.config) if asks_hub else ():
            draft.add(mistake)
    return checked(draft)


def _problems(
    path: Path, config: Config, root: Node, *, resumes: bool, generators: bool, is_here: bool
) -> list[Mistake]:
    """Return the mistakes of a config on this machine. Raises OSError for a name that is too long."""
    generators = generators and config.cluster.kind is None
    found = [*architecture_problems(config.model, images_key=config.data.images_key)]
    found += [*file_problems(config), *teacher_problems(config), *model_problems(config)]
    found += [*function_problems(config, root, generators=generators), *row_problems(config)]
    found += outside_problems(config, resumes=resumes, generators=generators)
    if config.cluster.kind == "kubernetes":
        from asyncrl.cluster import kubernetes  # it imports what keys are made with

        found += kubernetes.problems(config)
    elif is_here:
        found += misplaced(config, count_gpus(), generators=generators, instances=has_instances())
        functions = [one.function for one in config.reward.functions]
        is_boxed = config.reward.sandbox == "bubblewrap"
        if is_boxed and (problem := reward_sandbox(functions, config.run.root).problem()):
            found.append(Mistake(("reward.sandbox",), problem))
    # Asked without `resumes`, too: it raises for a run.root that is too long.
    is_there = config.run.directory.exists() or path.name == "config.yaml"
    if resumes and is_there:
        # Heavy libraries, which a first run need not load.
        from asyncrl.run.directory import RunDirectory
        from asyncrl.run.saved import changes, moved, read_saved

        saved = read_saved(RunDirectory(config.run.directory))
        others = list(moved(path, config.run, root)) or list(changes(config, saved, DataFiles(config)))
        reported = {mistake.keys for mistake in found}  # for example a missing file
        found += [one for one in others if one.keys not in reported]
    return found
