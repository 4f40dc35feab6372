"""What a config needs besides its files: programs, keys, what libraries take, names and rights on the hub."""

import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from asyncrl.config.algorithm_rules import optimizers
from asyncrl.config.base import Mistake
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.config.named_files import SEEDS, is_local, unusable
from asyncrl.config.reward_section import HttpReward
from asyncrl.config.schema import Config
from asyncrl.errors import RewardError, install_command
from asyncrl.hosting.gpus import count_gpus
from asyncrl.plugins import package_spec
from asyncrl.rewards.endpoints import key_of
from asyncrl.trainer.rates import rate_share

# Schedules that need no arguments, which transformers would check, but takes seconds to import.
PLAIN = ("constant", "linear", "cosine")
ANSWER_S = 10.0  # longest wait for the hub
# What refusals of the hub mean, by the names of its client's errors.
REFUSALS = {
    "GatedRepoError": "gives it only to those who have accepted its conditions there",
    "HFValidationError": "takes no such name",
    "RemoteEntryNotFoundError": "has it without config.json, so it is no model of transformers",
    "RepositoryNotFoundError": "has none of this name, or not for you",
    "RevisionNotFoundError": "has it without this revision",
}


def outside_problems(config: Config, *, resumes: bool, generators: bool) -> Iterator[Mistake]:
    """Find what the optimizers' libraries refuse, and a hub to which this machine may not push.

    With `generators` these are on this machine, which then must have the programs and keys that they use.

    With `resumes`, a run that has saved something goes on without its hub, of which its learner warns.
    """
    yield from _optimizer_problems(config)
    if config.model.has_4bit_base:
        yield from _bits_problems(config, generators=generators)
    if generators:
        for key, environment in config.environments.items():
            yield from _program_problems(key, environment)
        for key, one in config.reward_functions.items():
            try:
                key_of(one.remote) if isinstance(one.remote, HttpReward) else None
            except RewardError as error:
                yield Mistake((f"{key}.params.key_env",), str(error))
    if config.checkpoint.hub is not None:
        from asyncrl.run.directory import RunDirectory
        from asyncrl.run.exports import refusal  # it imports huggingface_hub

        has_saved = resumes and RunDirectory(config.run.directory).saved_mark.exists()
        if not has_saved and (text := refusal(config.checkpoint.hub)):
            yield Mistake(("checkpoint.hub.repo",), text)


def _optimizer_problems(config: Config) -> Iterator[Mistake]:
    """Find a library that this machine lacks, and arguments that transformers refuses for a schedule."""
    for where, optimizer, steps, _ in optimizers(config.learner, config.critic, config.batch):
        if optimizer.kind == "adamw_8bit":
            yield from _lacking_bitsandbytes(config, f"{where}.kind")
        if optimizer.schedule in PLAIN and not optimizer.schedule_arguments:
            continue
        try:
            share = rate_share(**optimizer.rates(steps))
            # A run may have more steps than can be counted here.
            found = [share(step) for step in (*range(0, steps, 1 + steps // 10_000), max(steps - 1, 0))]
            if not all(0 <= one <= 1 + 1e-9 for one in found):
                raise ValueError(f"the rate would be from {min(found):g} to {max(found):g} times lr")
        except (ArithmeticError, TypeError, ValueError) as error:
            given = optimizer.schedule_arguments or "nothing"
            text = f"found {given}, which transformers' {optimizer.schedule} does not take: {error}"
            cure = f"correct it, or set another {where}.schedule"
            yield Mistake((f"{where}.schedule_arguments", f"{where}.schedule"), f"{text}; {cure}")


def _lacking_bitsandbytes(config: Config, key: str) -> Iterator[Mistake]:
    # The learner of a run on Kubernetes has the packages of its image.
    if config.cluster.kind != "kubernetes" and find_spec("bitsandbytes") is None:
        text = f"the package bitsandbytes is not installed; run: {install_command('bitsandbytes')}"
        yield Mistake((key,), text)


def _bits_problems(config: Config, *, generators: bool) -> Iterator[Mistake]:
    """Find what this machine lacks to keep a base in 4 bits, in the learner and in `generators` here."""
    key = "model.lora.load_in_4bit"
    yield from _lacking_bitsandbytes(config, key)
    if config.generator.engine == "vllm":
        cure = "set generator.engine: transformers"
        if config.learner.device == "cpu" or (generators and not count_gpus()):
            text = f"generator.engine is vllm, which keeps a base in 4 bits on GPUs only; {cure}"
            yield Mistake((key, "generator.engine"), text)
        elif generators and find_spec("vllm_bnb_plugin") is None:
            text = "vLLM needs a package for weights in 4 bits; run: pip install vllm-bnb-plugin, or"
            yield Mistake((key, "generator.engine"), f"{text} {cure}")


def _program_problems(key: str, environment: EnvironmentConfig) -> Iterator[Mistake]:
    """Find programs of the environment that this machine, where generators run, lacks."""
    python = environment.python
    if python is not None and shutil.which(python) is None:
        found = f"found {python}, which is no program" if python.is_file() else unusable(str(python))
        cure = "give the path of a Python interpreter that may be executed, or a name on PATH"
        yield Mistake((f"{key}.python",), f"{found}; {cure}")
    elif environment.command and shutil.which(environment.program) is None:
        text = f"found no program `{environment.program}`; give its path, or a name on PATH"
        yield Mistake((f"{key}.command",), text)
    program, *words = environment.command or ("",)
    # What the arguments of another program mean, such as the script of a shell, only that program knows.
    if not Path(program).name.startswith("python"):
        return
    # Options may stand in one word, and so may an option and what it takes: `-um`, `-mjson.tool`.
    split = (re.sub(r"\A-[bBdEiIOPqsSuvx]*([cm])", "-\\1\0", one).split("\0") for one in words)
    words = [part for parts in split for part in parts if part]
    values = {at + 1 for at, word in enumerate(words) if word in ("-W", "-X")}
    begins = (n for n, one in enumerate(words) if n not in values and (one[:1] != "-" or one in ("-c", "-m")))
    first, *others = words[next(begins, len(words)) :] or [""]
    found = ""
    if first == "" or (first in ("-c", "-m") and not others):
        found = "found python without a script; add its path"
    elif first == "-m" and python is None and package_spec(module := others[0].partition(".")[0]) is None:
        found = f"found no module `{module}`; install it, or give the path of a script"
    elif first not in ("-c", "-m") and not Path(first).exists():
        found = f"{unusable(first)}; paths are relative to {Path.cwd()}; give the path of the script"
    if found:
        yield Mistake((f"{key}.command",), found)


def absent_names(config: Config) -> Iterator[Mistake]:
    """Find names of models and datasets that neither this machine's cache has nor the hub gives.

    If the hub cannot be reached, it is asked for one name only.
    """
    models = [("model.path", config.model.path, config.model.revision)]
    if (config.reference.path, config.reference.revision) != (config.model.path, config.model.revision):
        models.append(("algorithm.reference.path", config.reference.path, config.reference.revision))
    models += [(f"scorers.{name}.model", scorer.model, None) for name, scorer in config.scorers.items()]
    named = [(key, "model", name, revision) for key, name, revision in models if not is_local(name)]
    for key, task in config.data.tasks.items():
        if not (task.path.startswith(SEEDS) or is_local(task.path)):
            whole, _, branch = task.path.partition("@")
            named.append((key, "dataset", whole.partition(":")[0], branch or None))
    unreached = ""
    for key, kind, name, revision in named:
        from huggingface_hub import constants  # slow to import

        if not (said := unreached or _refusal(kind, name, revision)):
            continue
        unreached = "" if said in REFUSALS.values() else said
        found = f"found no {kind} {name}{f'@{revision}' if revision else ''} on this machine"
        by_hand = f"`hf download {name} --repo-type {kind} --local-dir DIRECTORY` where there is a network"
        cure = f"correct the name, run `hf auth login`, or give the directory that {by_hand} makes"
        yield Mistake((key,), f"{found}, and {constants.ENDPOINT} {said}; {cure}")


def _refusal(kind: str, name: str, revision: str | None) -> str:
    """Say why the hub does not give what this machine lacks; empty if it does, or if there is a copy."""
    from huggingface_hub import HfApi, hf_hub_url, try_to_load_from_cache

    file = "config.json" if kind == "model" else "README.md"
    plain = str.maketrans("", "", "/_")  # the library of datasets makes one directory of both parts
    try:
        if kind == "dataset":
            from datasets.config import HF_DATASETS_CACHE  # slow to import

            made = {one.name.lower().translate(plain) for one in Path(HF_DATASETS_CACHE).glob("*")}
            if name.lower().translate(plain) in made:
                return ""
        if isinstance(try_to_load_from_cache(name, file, revision=revision, repo_type=kind), str):
            return ""
        url = hf_hub_url(name, file, revision=revision, repo_type=kind)
        HfApi().get_hf_file_metadata(url=url, timeout=ANSWER_S)
    except Exception as error:  # noqa: BLE001 - the service and its client raise anything
        known = type(error).__name__
        if kind == "dataset" and known == "RemoteEntryNotFoundError":
            return ""
        line = " ".join(str(error).split()) or known
        return REFUSALS.get(known, f"cannot be asked ({line:.300})")
    return ""
