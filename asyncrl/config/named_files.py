"""Checks that need no model in memory: files exist, sizes fit, required packages are installed."""

import errno
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl.config.base import Mistake
from asyncrl.config.data_section import DataConfig, EvalSet
from asyncrl.config.document import Node, read
from asyncrl.config.model_files import AGAIN, SHOWN, Unusable, model_problems, read_settings, usable_json
from asyncrl.config.reward_section import HttpReward
from asyncrl.config.schema import Config
from asyncrl.config.sections import ModelConfig, TelemetryConfig
from asyncrl.config.wording import closest, divisors
from asyncrl.errors import ConfigError, install_command

# Suffixes by which a name is recognised as a file; not all of them can be read.
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zst", ".zip", ".xlsx", ".arrow")
# Begins a source of rows `{seed: 0}`, `{seed: 1}`, ... for environments that make their tasks.
SEEDS = "seeds:"
# Characters of a pattern.
WILD = frozenset("*?[")
# Where `asyncrl quickstart` puts its model and data, below the working directory.
QUICKSTART = "build/quickstart"
# Name of the Hugging Face directory in the run directory of a stage.
EXPORT = "hf"
# Switch in `telemetry`, which is also the name of our extra and of the module -> the value that means off.
TRACKERS = {"wandb": "off", "tensorboard": False}

# Modules of the extra `judge`; a service without a limit needs the first one only.
JUDGES = ("openai", "aiolimiter")
LIMITS = {"requests_per_minute", "tokens_per_minute"}


def file_problems(config: Config) -> Iterator[Mistake]:
    """Find mistakes in the files that a config names on this host. Hub names are not checked."""
    yield from data_problems({key: one.path for key, one in config.data.tasks.items()})
    for place, task in config.data.tasks.items():
        name = "eval_split" if place.startswith("data.eval") else "split"
        own = isinstance(task, EvalSet) and task.split is not None
        key, value = f"{place}.split" if own else f"data.{name}", config.data.split_of(task)
        is_hub = not (local_files(task.path) or task.path.startswith(SEEDS))
        if not is_hub and (own or value != DataConfig.model_fields[name].default):
            text = f"is {value}, but {task.path} has no splits; write the rows into a file of their own,"
            yield Mistake((key,), f"{text} or set `limit`, and drop {key}")
        if is_hub and importlib.util.find_spec("datasets") is None:
            text = f"{task.path} is no file of rows, so it needs the package datasets, which is not installed"
            yield Mistake((place,), f"{text}; {install_command('data')}, or give a file")
    yield from policy_problems(config.model)
    yield from _sizes(config)
    yield from _teacher(config)
    yield from _scorers(config)
    yield from _division(config)
    yield from _judges(config)
    if config.cluster.kind == "ray" and importlib.util.find_spec("ray") is None:
        yield Mistake(("cluster.kind",), f"is ray, but ray is not installed; {install_command('ray')}")
    yield from tracker_problems(config.telemetry)


def data_problems(places: Mapping[str, str | None]) -> Iterator[Mistake]:
    """Find a source of rows, by its key, that has none on this host."""
    for key, source in places.items():
        if found := _no_data(source):
            cure = "give a file of rows, a pattern, a directory with some, or a Hugging Face dataset"
            yield Mistake((key,), f"{found}; {cure}")


def _no_data(source: str | None) -> str:
    """Say why the source has no rows; return an empty text if it may have some, or is not set."""
    if source == "":
        return "found an empty text"
    if source is None or not is_local(source):
        return ""
    path = Path(source)
    if not path.is_dir():
        return "" if local_files(source) else unusable(source)
    entries = chain(path.glob("*"), path.glob("*/*"))
    has_data = any(entry.suffix in SUFFIXES for entry in entries)
    return "" if has_data else f"found no data in the directory {source}"


def local_files(source: str) -> list[Path]:
    """Return the file of that name or, sorted, the files that match it as a pattern; empty without any."""
    if Path(source).is_file():
        return [Path(source)]
    found = glob(source, recursive=True) if WILD & set(source) else []
    return [path for path in map(Path, sorted(found)) if path.is_file()]


def is_local(source: str) -> bool:
    """Return whether the source is a path or a pattern and not a hub name, which has at most one slash."""
    is_path = source.startswith(("/", ".", "~", "$")) or source.endswith("/") or source.count("/") > 1
    return is_path or source.endswith(SUFFIXES) or bool(WILD & set(source)) or Path(source).exists()


def unusable(source: str) -> str:
    """Say what is at a path, where something else is wanted. If nothing is there, name a similar path."""
    path = Path(source)
    if path.exists():
        kind = (
            "a directory" if path.is_dir() else "a file" if path.is_file() else "neither file nor directory"
        )
        return f"found {source}, which is {kind}"
    if path.is_symlink():
        return f"found {source}, a link to {path.readlink()}, which does not exist"
    if WILD & set(source):
        return f"found no file that matches {source}"
    neighbours = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = closest(path.name, neighbours)
    hint = f" (did you mean `{path.parent / close}`?)" if close else ""
    written = ", where ~ and variables are not expanded: write them out" if {"~", "$"} & set(source) else ""
    made = ", which `asyncrl quickstart` makes" if path.is_relative_to(QUICKSTART) else ""
    return f"found no {source}{made}{written}{hint}"


def too_long(error: OSError, root: Node) -> Mistake:
    """Return the mistake of the value that names a file with too long a name; raise any other error."""
    named = os.fsdecode(error.filename or b"")
    values = [(one.value, keys) for keys, one in root.walk() if isinstance(one.value, str) and one.value]
    found = [(len(value), keys) for value, keys in values if value in named or named in value]
    if error.errno != errno.ENAMETOOLONG or not (named and found):
        raise error
    text = f"found {named:.40}..., which is too long for a path: a name has at most 255 bytes, a path 4,095"
    return Mistake((".".join(map(str, max(found)[1])),), f"{text}; choose a shorter one")


def policy_problems(model: ModelConfig) -> Iterator[Mistake]:
    """Find mistakes in the files of the model that is trained."""
    directory = Path(model.path)
    yield from _misplaced("model.path", model.path)
    if not directory.is_dir() or misused_stage(directory):
        return
    if problems := model_problems(directory, remote_code=model.trust_remote_code):
        # One message per key.
        yield Mistake(("model.path",), "; and ".join(problems[:SHOWN]))
    if model.chat_template is True and not has_chat_template(directory):
        text = f"is true, but the tokenizer in {directory} has no template; set it to false or add one"
        yield Mistake(("model.chat_template",), text)
    elif model.chat_template is True and (own := directory / "chat_template.jinja").is_file():
        try:
            own.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            text = f"is true, but {own} is not UTF-8 from byte {error.start} on; {AGAIN}"
            yield Mistake(("model.chat_template",), text)


def _misplaced(key: str, path: str) -> Iterator[Mistake]:
    """Find a path that is not a model, where it is not a hub name either."""
    directory = Path(path)
    if found := misused_stage(directory):
        yield Mistake((key,), found)
    elif not directory.is_dir() and is_local(path):
        yield Mistake((key,), f"{unusable(path)}; give a Hugging Face model directory or a hub name")


def is_stage(config: Path) -> bool:
    """Return whether a file, or one that it extends, has the key `stage`, which only stages have."""
    try:
        return "stage" in read(Config, config)[0].plain()
    except ConfigError:  # it is reported where the file is loaded
        return False


def misused_stage(path: Path) -> str:
    """Say why a path in the run directory of a stage is not a whole model; else return an empty text."""
    directory = path.parent if path.name == EXPORT else path
    config, model = directory / "config.yaml", directory / EXPORT
    if not is_stage(config):
        return ""
    if not model.is_dir():
        again = f"`asyncrl stage {config}` goes on with it"
        return f"found {path}, of a stage that is not finished and has no model yet; {again}"
    if (model / "adapter_config.json").is_file():
        cure = f"`asyncrl export {directory} --merge --to DIRECTORY` makes a whole model of it; as the policy"
        start = f"its base may be model.path, with model.lora.start: {model}"
        return f"found {path}, of a stage that made an adapter; {cure}, {start}"
    return "" if path == model else f"found {path}, the run directory of a stage; its model is {model}"


def _teacher(config: Config) -> Iterator[Mistake]:
    one = config.algorithm.reference
    if one is not None and one.path is not None:
        for keys, text in policy_problems(config.reference):
            if keys == ("model.path",):  # nothing is rendered for a teacher
                yield Mistake(("algorithm.reference.path",), text)
    for scorer in config.teacher.values():
        most = _number(usable_json(Path(scorer.model) / "config.json"), "max_position_embeddings")
        if 0 < most <= config.sampling.max_tokens:  # vLLM samples one token behind those it scores
            found = f"{scorer.model} takes {most} tokens, and scorers need one more than the longest sequence"
            text = f"{found} ({config.sampling.max_tokens}); lower sampling.max_response_tokens"
            yield Mistake(("algorithm.reference.scorers", "sampling.max_response_tokens"), text)


def _scorers(config: Config) -> Iterator[Mistake]:
    """Find judges without a template, and reward models that score nothing, or read others' tokens."""
    for name, scorer in config.scorers.items():
        directory, key = Path(scorer.model), f"scorers.{name}.model"
        yield from _misplaced(key, scorer.model)
        if not directory.is_dir() or misused_stage(directory):
            continue
        settings = usable_json(directory / "config.json")
        if name in config.judges:
            if not has_chat_template(directory):
                yield Mistake((key,), f"the tokenizer in {directory} has no chat template; give a chat model")
            elif 0 < (most := _number(settings, "max_position_embeddings")) < scorer.max_tokens:
                text = f"is {scorer.max_tokens}, but {directory} takes {most} tokens; lower it"
                yield Mistake((f"scorers.{name}.max_tokens",), text)
            continue
        kind, labels = (settings.get("architectures") or ["no model"])[0], settings.get("id2label", "ab")
        if not kind.endswith("ForSequenceClassification") or len(labels) != 1:
            found = f"found {kind} with {len(labels)} labels in {directory}"
            yield Mistake((key,), f"{found}; needed is a sequence classifier with one, of `asyncrl stage` rm")
            continue
        # A model of the hub has its tokenizer there.
        theirs, ours = vocabulary(directory), vocabulary(Path(config.model.path))
        if any(theirs) and any(ours) and theirs != ours:
            text = f"has another tokenizer than model.path ({config.model.path}), but reads its token ids"
            yield Mistake((key, "model.path"), f"{directory} {text}; use a reward model trained from it")


def vocabulary(directory: Path) -> tuple[Any, Any]:
    """Return what the tokenizer's file says of the ids of tokens: the model's, and added ones."""
    tokenizer = usable_json(directory / "tokenizer.json")
    return tokenizer.get("model", {}).get("vocab"), tokenizer.get("added_tokens")


def _number(settings: Mapping[str, Any], key: str) -> int:
    """Return a number of config.json; 0 without one, and for what loading the model refuses."""
    found = settings.get(key)
    return found if isinstance(found, int) else 0


def has_chat_template(directory: Path) -> bool:
    """Return whether the tokenizer in a model directory has a chat template."""
    settings = directory / "tokenizer_config.json"
    files = ("chat_template.jinja", "additional_chat_templates/*.jinja")
    return any(any(directory.glob(name)) for name in files) or (
        settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8", errors="replace")
    )


def _sizes(config: Config) -> Iterator[Mistake]:
    try:
        text = read_settings(Path(config.model.path))
    except Unusable:  # reported by `model_problems`
        return
    sampling, positions = config.sampling, _number(text, "max_position_embeddings")
    if 0 < positions < sampling.max_tokens:
        found = f"found max_prompt_tokens {sampling.max_prompt_tokens} + max_response_tokens"
        found += f" {sampling.max_response_tokens} = {sampling.max_tokens}; allowed is {positions}"
        cure = "(max_position_embeddings of the model); lower one of them"
        yield Mistake(("sampling.max_response_tokens",), f"{found} {cure}")
    heads, generator, learner = _number(text, "num_attention_heads"), config.generator, config.learner
    allowed = f"allowed is a divisor of the {heads} attention heads; set one of {divisors(heads)}"
    if heads % generator.tensor_parallel:
        yield Mistake(("generator.tensor_parallel",), f"found {generator.tensor_parallel}; {allowed}")
    if heads % learner.sequence_parallel:
        yield Mistake(("learner.sequence_parallel",), f"found {learner.sequence_parallel}; {allowed}")


def _division(config: Config) -> Iterator[Mistake]:
    sequences = config.batch.sequences // config.batch.minibatches
    if sequences < config.learner.shares:
        most = sequences * config.learner.sequence_parallel
        found = f"found {config.learner.ranks} ranks for {sequences} sequences per optimizer step"
        text = (
            f"{found} (batch.groups * group_size / minibatches); allowed is at most {most}; use fewer ranks"
        )
        yield Mistake(("learner.ranks",), text)


def _judges(config: Config) -> Iterator[Mistake]:
    for key, one in config.reward_functions.items():
        if isinstance(one.remote, HttpReward):
            has_limit = any(one.remote.model_dump(include=LIMITS).values())
            needed = JUDGES if has_limit else JUDGES[:1]
            if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
                found = f"is {one.function}, but {' and '.join(missing)} is not installed"
                yield Mistake((f"{key}.function",), f"{found}; {install_command('judge')}")


def tracker_problems(telemetry: TelemetryConfig) -> Iterator[Mistake]:
    """Find trackers whose library is not installed."""
    for name, off in TRACKERS.items():
        value = getattr(telemetry, name)
        if value != off and importlib.util.find_spec(name) is None:
            found, without = (json.dumps(one).strip('"') for one in (value, off))
            cure = f"{install_command(name)}, or set it to {without}"
            yield Mistake((f"telemetry.{name}",), f"is {found}, but {name} is not installed; {cure}")
