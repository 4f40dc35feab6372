"""`asyncrl export`: the newest checkpoint as a model directory for Hugging Face and vLLM, with a card.

A run with `model.lora` has an adapter in its checkpoints, which can be merged into its base.
"""

import json
import re
import shutil
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml

from asyncrl.config.load import load
from asyncrl.config.model_files import require_loadable
from asyncrl.config.named_files import EXPORT, has_chat_template, is_local, is_stage, misused_stage
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.lora import SETTINGS, TENSORS, merged
from asyncrl.results.archive import Archive, read_archive
from asyncrl.run.directory import RunDirectory, write_directory
from asyncrl.stages.settings import StageConfig
from asyncrl.telemetry.history import of_sets
from asyncrl.telemetry.text import duration, visible, visible_lines

CARD = "README.md"
SHOWN = ("eval/accuracy", "eval/reward_mean", "reward/mean", "completions/length_mean")  # metrics of the card
# What the card of an adapter, and that of the model with it, say of the directory.
MERGED = {
    "library_name: peft": "library_name: transformers",
    "base_model_relation: adapter\n": "",
    "- lora\n": "",
}
# Sections of the config on which the weights depend. Hosts, ports and paths, all private, are in others.
TRAINING_PARTS = (
    "model", "data", "reward", "batch", "sampling", "staleness", "algorithm", "critic", "learner", "eval",
)  # fmt: skip


def export_model(directory: RunDirectory, to: Path, *, merge: bool = False, best: bool = False) -> Path:
    """Copy the newest checkpoint's model and tokenizer to the new directory `to`, and write a model card.

    With `best` it is that of `checkpoint.best`. With `merge`, its adapter is added to the weights of
    model.path. Returns the directory that was copied.
    """
    if to.exists():
        raise RunError(f"{to} exists; give --to a new directory")
    source = saved_export(directory, best=best)
    if merge and not (source / SETTINGS).exists():
        raise RunError(f"{source} is a whole model and no adapter; export it without --merge")
    with write_directory(to) as writing:
        if merge:
            (_merge_stage if is_stage(directory.config) else _merge)(directory, source, writing)
        else:
            shutil.copytree(source, writing, dirs_exist_ok=True)
        if is_stage(directory.config):
            card = (source / CARD).read_text(encoding="utf-8")
            for theirs, ours in MERGED.items() if merge else ():
                card = card.replace(theirs, ours)
        else:
            step, template = int(source.parent.name.removeprefix("step-")), has_chat_template(writing)
            served, is_adapter = serve_command(writing, to.name), (writing / SETTINGS).exists()
            card = model_card(
                read_archive(directory), step, served=served, has_template=template, is_adapter=is_adapter
            )
        (writing / CARD).write_text(card, encoding="utf-8")
    return source


def serve_command(exported: Path, name: str) -> str:
    """Return the command that serves an exported directory, which is then called `name`."""
    if not (exported / SETTINGS).exists():
        return f"vllm serve {name}"
    adapter = json.loads((exported / SETTINGS).read_text(encoding="utf-8"))
    base, rank = adapter["base_model_name_or_path"], adapter["r"]
    base += f" --revision {adapter['revision']}" if adapter.get("revision") else ""
    return f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules policy={name}"


def _merge(directory: RunDirectory, source: Path, to: Path) -> None:
    """Write the model of the run with the adapter in `source` added to it."""
    import torch
    from safetensors.torch import load_file

    from asyncrl.trainer import loading

    config = load(Config, directory.config).model
    if config.lora is None:
        found = f"{directory.config} has no model.lora, but {source} is an adapter"
        raise RunError(f"{found}; restore the config")
    base = config.model_copy(update={"lora": None})
    model = loading.load_model(base, torch.device("cpu"))
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    loading.export_model(model, base, dict(merged(named, load_file(source / TENSORS), config.lora)), to)


def _merge_stage(directory: RunDirectory, source: Path, to: Path) -> None:
    """Write the model of the stage with the adapter in `source`, which for scores has the head, too."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from asyncrl.trainer.loading import require_writable

    stage = load(StageConfig, directory.config)
    require_loadable(stage.model.path, remote_code=stage.model.trust_remote_code)
    stage.model.architecture()  # a base that cannot be read is not an error of the directory to write
    of_scores = stage.stage == "rm"
    kind = AutoModelForSequenceClassification if of_scores else AutoModelForCausalLM
    more = {"num_labels": 1} if of_scores else {}
    model = kind.from_pretrained(stage.model.path, dtype=stage.model.dtype, **stage.model.hub_options, **more)
    # TRL may have changed it, and scores of several texts need the token that pads.
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=stage.model.trust_remote_code)
    model.config.pad_token_id = tokenizer.pad_token_id
    require_writable(getattr(model, "generation_config", None))
    PeftModel.from_pretrained(model, str(source)).merge_and_unload().save_pretrained(to)
    tokenizer.save_pretrained(to)


def saved_export(directory: RunDirectory, *, best: bool = False) -> Path:
    """Return the Hugging Face directory in the newest or the best checkpoint, or that of a finished stage."""
    if is_stage(directory.config):
        if best:
            raise RunError(f"{directory.path} is a stage, which has one model; drop --best")
        if not directory.model.is_dir():
            raise RunError(misused_stage(directory.model))
        return directory.model
    from asyncrl.run.best import read_best
    from asyncrl.run.checkpoint import CheckpointStore

    checkpoints = CheckpointStore(directory.checkpoints, directory.checkpoint_key(), keep=1)
    if best:
        record = read_best(directory.checkpoints)
        found = directory.saved_steps().get(record["step"]) if record else None
        if found is None:
            text = f"{directory.checkpoints} has no best checkpoint"
            raise RunError(f"{text}; checkpoint.best names its metric")
        checkpoints.verify_export(found)
        return found / EXPORT
    newest = checkpoints.latest(exported=True)
    if newest is None:
        text = "has no valid checkpoint with a model; checkpoint.every sets their interval"
        raise RunError(f"{directory.checkpoints} {text}")
    return newest / EXPORT


def model_card(
    archive: Archive, step: int, *, served: str, has_template: bool, is_adapter: bool = False
) -> str:
    """Return the model's origin, training, results up to `step`, and the command by which it is `served`."""
    rewards = [*archive.config.get("reward", {}).get("functions", [])]
    rewards += [one for source in archive.sections for one in source.get("reward") or ()]
    config = {part: values for part, values in archive.config.items() if part in TRAINING_PARTS}
    start = archive.starts[-1] if archive.starts else None
    shown = partial(archive.history.shown, until=step)  # later steps are not in these weights
    names = (name for wanted in SHOWN for name in of_sets(wanted, archive.names))
    results = [(name, shown(name, "first"), shown(name, "last")) for name in names]
    template = resources.files("asyncrl.results").joinpath("model_card.md").read_text(encoding="utf-8")
    # In Markdown nothing is escaped.
    environment = jinja2.Environment(autoescape=False, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        front_matter=_front_matter(archive, is_adapter=is_adapter),
        name=visible(archive.name),
        step=step,
        setting=lambda name: _code(_setting(archive, name)),
        data=", ".join(map(_code, archive.sources)),
        code=_code,
        results=[row for row in results if row[1] != "-"],
        rewards=[f"{reward.get('function')}, weight {reward.get('weight')}" for reward in rewards],
        trained_tokens=f"{sum(tokens for at, tokens in archive.history.series('tokens') if at <= step):,.0f}",
        wall_time=duration(archive.wall_s),
        versions=start.versions if start else {},
        hardware=start.hardware if start else "not recorded",
        served=served,
        uses_template=_setting(archive, "model.chat_template") not in ("False", "?"),
        has_template=has_template,
        config=visible_lines(yaml.safe_dump(config, sort_keys=False).strip()).replace("```", "'''"),
    )


def _front_matter(archive: Archive, *, is_adapter: bool) -> str:
    """Return metadata for the Hugging Face hub, without paths of this machine."""
    tags = ["asyncrl", "reinforcement-learning", _setting(archive, "algorithm.advantage.name")]
    library, more = ("peft", ["lora"]) if is_adapter else ("transformers", [])
    values = {"library_name": library, "pipeline_tag": "text-generation", "tags": tags + more}
    if (model := _setting(archive, "model.path")) != "?" and not is_local(model):
        values |= {"base_model": model} | ({"base_model_relation": "adapter"} if is_adapter else {})
    names = [re.split("[:@]", source)[0] for source in archive.sources]
    if data := [name for name in names if name.count("/") == 1 and not is_local(name)]:
        values["datasets"] = data
    return yaml.safe_dump(values, sort_keys=False)


def _setting(archive: Archive, name: str) -> str:
    """Return a setting by its dotted name; `?` if the run has none."""
    value: Any = archive.config
    for key in name.split("."):
        value = value.get(key, "?") if isinstance(value, dict) else "?"
    return str(value)


def _code(text: str) -> str:
    """Return text as inline code, so that a value of the config is not read as Markdown."""
    return f"`{visible(text).replace('`', chr(39))}`"
