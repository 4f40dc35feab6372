"""The model card of a stage's model."""

from collections.abc import Mapping
from typing import Any

import yaml

from asyncrl.config.named_files import is_local
from asyncrl.stages.settings import StageConfig
from asyncrl.stages.trl_settings import TRAINERS
from asyncrl.telemetry.text import visible, visible_lines


def stage_card(config: StageConfig, record: Mapping[str, Any], library: str) -> str:
    """Return origin, rows, settings and results of the model, without paths of this machine in the head."""
    model, data = config.model.path, config.data.train.partition(":")[0]
    task = "text-classification" if config.stage == "rm" else "text-generation"
    head = {"library_name": library, "pipeline_tag": task, "tags": ["asyncrl", "trl", config.stage]}
    head |= {} if is_local(model) else {"base_model": model}
    head |= {} if is_local(data) else {"datasets": [data]}
    made = {"rows": record["fixed"]["data.train"], "trl": config.trl, "versions": record["versions"]}
    before, after = record["before"], record["after"]
    measured = [f"| {visible(name)} | {before.get(name, '')} | {after[name]} |" for name in after]
    trainer = f"TRL's {TRAINERS[config.stage][1]}Trainer"
    return "\n".join(
        [
            "---", _yaml(head), "---", "", f"# {visible(config.run.name)}", "",
            f"{visible(model)} after {record['steps']} steps of {trainer}.", "",
            "| held out | before | after |", "|---|---|---|", *measured, "",
            "```yaml", visible_lines(_yaml(made)).replace("```", "'''"), "```", "",
        ]
    )  # fmt: skip


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False).strip()
