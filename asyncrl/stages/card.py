"""The model card of a stage's model."""

from collections.abc import Mapping
from typing import Any

import yaml

from asyncrl.config.named_files import is_local
from asyncrl.stages.settings import StageConfig
from asyncrl.telemetry.text import visible, visible_lines

KINDS = {
    "sft": "supervised fine-tuning on given answers",
    "rm": "training as a reward model on pairs of answers",
    "dpo": "direct preference optimization on pairs of answers",
    "kto": "KTO on answers labelled good and bad",
    "distil": "distillation from a teacher",
}


def stage_card(config: StageConfig, record: Mapping[str, Any], *, is_adapter: bool) -> str:
    """Return origin, rows, settings and results of the model, without paths of this machine in the head."""
    model, data = config.model.path, config.data.train
    task = "text-classification" if config.stage == "rm" else "text-generation"
    library = "peft" if is_adapter else "transformers"
    head: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": task,
        "tags": ["asyncrl", "trl", config.stage],
    }
    head |= {} if is_local(model) else {"base_model": model}
    head |= {} if is_local(data) else {"datasets": [data.partition(":")[0]]}
    before, after = record["before"], record["after"]
    measured = [f"| {visible(name)} | {before.get(name, '')} | {after[name]} |" for name in after]
    results = (
        ["| held out | before | after |", "|---|---|---|", *measured] if measured else ["No held-out rows."]
    )
    rows = [f"* data.{key}: {found}" for key, found in record["data"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    settings = visible_lines(yaml.safe_dump(config.trl, sort_keys=False).strip()).replace("```", "'''")
    return "\n".join(
        [
            "---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "",
            f"# {visible(config.run.name)}", "",
            f"{visible(model)} after {record['steps']} steps of {KINDS[config.stage]}, by TRL.", "",
            *results, "", *rows, f"* versions: {versions}", "",
            "What the config changes in TRL's settings:", "", "```yaml", settings, "```", "",
        ]
    )  # fmt: skip
