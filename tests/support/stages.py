"""A tiny stage of each kind, with rows from which it learns in seconds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.load import load
from asyncrl.config.resolved import dump_config
from asyncrl.run.directory import RunDirectory
from asyncrl.stages.record import begin_stage
from asyncrl.stages.rows import fixed_values
from asyncrl.stages.settings import StageConfig
from tests.support.models import tiny_qwen2

TRL: Mapping[str, Any] = {
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 16,
    "logging_steps": 2,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "dataloader_pin_memory": False,
}
MORE: Mapping[str, Mapping[str, Any]] = {
    "sft": {"max_steps": 24},
    "rm": {"max_steps": 24},
    "dpo": {"max_steps": 24},
    "kto": {"max_steps": 24},
    "distil": {"max_steps": 16, "max_completion_length": 8, "per_device_train_batch_size": 16},
}


def rows_of(stage: str, first: int, count: int) -> list[dict[str, Any]]:
    """Odd sums are good answers, and even ones bad."""
    found = []
    for number in range(first, first + count):
        prompt, good, bad = f"{number}+", f"{number % 7}1357", f"{number % 7}2468"
        match stage:
            case "sft":
                found.append({"prompt": prompt, "completion": good, "note": number if number % 2 else "x"})
            case "rm" | "dpo":
                found.append({"prompt": prompt, "chosen": good, "rejected": bad})
            case "kto":
                is_good = number % 2 == 0
                found.append({"prompt": prompt, "completion": good if is_good else bad, "label": is_good})
            case _:
                found.append({"prompt": prompt})
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_stage(
    directory: Path, stage: str, *, name: str = "", trl: Mapping[str, Any] = {}, **sections: Any
) -> Path:
    """Write model, rows and config of a stage below `directory`, and return the config's path."""
    model = directory / "model"
    if not model.exists():
        tiny_qwen2(model)
    values: dict[str, Any] = {
        "run": {"name": name or stage, "root": str(directory / "runs")},
        "stage": stage,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "train": str(write_rows(directory / f"{stage}.jsonl", rows_of(stage, 10, 64))),
            "eval": str(write_rows(directory / f"{stage}-eval.jsonl", rows_of(stage, 80, 16))),
        },
        "trl": {**TRL, **MORE[stage], **trl},
    }
    if stage == "distil":
        values["teacher"] = {"path": str(tiny_qwen2(directory / "teacher", seed=1))}
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes} if isinstance(changes, dict) else changes
    path = directory / f"{name or stage}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def begun(path: Path) -> tuple[StageConfig, RunDirectory]:
    """The run directory as `asyncrl stage` leaves it to the process that trains."""
    config = load(StageConfig, path)
    directory = RunDirectory(config.run.directory)
    directory.create(fresh=False)
    directory.draw_secret()
    directory.config.write_text(dump_config(config))
    begin_stage(config, directory, fixed_values(config))
    return config, directory
