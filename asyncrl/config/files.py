"""What can be known without loading a model: a config's files exist, the sizes fit, the packages it needs are installed."""

import difflib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.report import panel
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
WEIGHTS = ("*.safetensors", "*.bin")
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
OPTIONAL_TRACKERS = ("tensorboard", "trackio")
"""Switch in `telemetry`, extra of this project, and module of the library: all of one name."""


def check_files(config: Config) -> None:
    """Checks the files and packages a config names on this host; names of the Hugging Face hub are left alone.

    Raises:
        ConfigError: its text lists everything that is missing or does not fit.
    """
    problems = [*_data(config), *_functions(config), *_model(config), *_division(config), *_packages(config)]
    if problems:
        raise ConfigError(panel(problems, title=f"the files of run `{config.run.name}` (looked from {Path.cwd()})"))


def _data(config: Config) -> Iterator[str]:
    for key in ("train", "eval"):
        source = getattr(config.data, key)
        if source and _is_local(source) and not Path(source).exists():
            yield f"data.{key}: {_absent(source)}; give a JSONL or parquet file, a directory, or a Hugging Face dataset"


def _functions(config: Config) -> Iterator[str]:
    named = [(f"reward.functions.{i}.function", one.function, "function") for i, one in enumerate(config.reward.functions)]
    named += [(f"learner.hooks.{i}.name", hook.name, "Class") for i, hook in enumerate(config.learner.hooks)]
    for key, name, kind in named:
        file = name.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            yield f"{key}: {_absent(file)}; give `path.py:{kind}`"


def _is_local(source: str) -> bool:
    """A path rather than a hub name, which has at most one slash."""
    return source.startswith(("/", ".", "~")) or source.count("/") > 1 or source.endswith(DATA_SUFFIXES)


def _absent(source: str) -> str:
    path = Path(source)
    neighbours = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, neighbours, n=1)
    return f"found no {source}" + (f" (did you mean `{path.parent / close[0]}`?)" if close else "")


def _model(config: Config) -> Iterator[str]:
    directory = Path(config.model.path)
    if not directory.is_dir():
        if _is_local(config.model.path) or directory.exists():
            yield f"model.path: {_absent(config.model.path)}; give a Hugging Face model directory or a hub name"
        return
    if not any((directory / name).is_file() for name in TOKENIZERS):
        yield f"model.path: found no tokenizer in {directory}; needed is one of {', '.join(TOKENIZERS)}; save it there"
    if not any(any(directory.glob(pattern)) for pattern in WEIGHTS):
        yield f"model.path: found no weights in {directory}; needed is {' or '.join(WEIGHTS)}; download or save them there"
    if config.model.chat_template and not _has_chat_template(directory):
        yield f"model.chat_template: is true, but the tokenizer in {directory} has no template; set it to false or add one"
    yield from _architecture(config, directory / "config.json")


def _has_chat_template(directory: Path) -> bool:
    settings = directory / "tokenizer_config.json"
    return (directory / "chat_template.jinja").is_file() or (
        settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")
    )


def _architecture(config: Config, path: Path) -> Iterator[str]:
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"model.path: cannot read {path}: {error}; give a Hugging Face model directory"
        return
    text: dict[str, Any] = {**model, **model.get("text_config", {})}
    sampling, positions = config.sampling, text.get("max_position_embeddings")
    if positions and sampling.max_tokens > positions:
        yield (
            f"sampling.max_response_tokens: found max_prompt_tokens {sampling.max_prompt_tokens} + max_response_tokens "
            f"{sampling.max_response_tokens} = {sampling.max_tokens}; allowed is {positions} (max_position_embeddings of the "
            "model); lower one of them"
        )
    heads, parallel = text.get("num_attention_heads"), config.generator.tensor_parallel
    if heads and heads % parallel:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        yield f"generator.tensor_parallel: found {parallel}; allowed is a divisor of the {heads} attention heads: {divisors}"


def _division(config: Config) -> Iterator[str]:
    sequences = config.batch.sequences // config.batch.minibatches
    if sequences < config.learner.ranks:
        yield (
            f"learner.ranks: found {config.learner.ranks} ranks for {sequences} sequences per optimizer step "
            "(batch.groups * group_size / minibatches); allowed is at most one rank per sequence; use fewer ranks"
        )


def _packages(config: Config) -> Iterator[str]:
    for name in OPTIONAL_TRACKERS:
        if getattr(config.telemetry, name) and importlib.util.find_spec(name) is None:
            yield f"telemetry.{name}: is true, but {name} is not installed; pip install 'asyncrl[{name}]', or set it to false"
