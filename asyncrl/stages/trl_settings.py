"""Which fields of TRL's config classes the section `trl` of a stage may set: all but those that are ours."""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.base import Mistake
from asyncrl.config.library_fields import fields_in, source_in
from asyncrl.config.wording import did_you_mean, shown

# TRL's module with the config class of each stage, and the name of that class without `Config`.
TRAINERS: Mapping[str, tuple[str, str]] = {
    "sft": ("sft", "SFT"),
    "rm": ("reward", "Reward"),
    "dpo": ("dpo", "DPO"),
    "kto": ("kto", "KTO"),
    "distil": ("distillation", "Distillation"),
}
_MODEL, _DTYPE = "set model.path, model.revision and model.dtype", "set model.dtype"
_NAME, _SEED, _RANKS = "set run.root and run.name", "set run.seed", "set ranks"
_TEACHER, _TRACKERS = "set teacher.path and teacher.revision", "set telemetry"
_WHOLE = "each rank holds the whole model; for less memory set model.lora"
_HUB = "nothing is uploaded; `asyncrl export` makes a directory for `hf upload`"
_SAME_COMMAND = "the same command resumes a stage"
_VLLM = "TRL does not know the installed vLLM; for samples by vLLM train with `asyncrl up`"

OURS: Mapping[str, str] = {
    **dict.fromkeys(("output_dir", "run_name", "logging_dir", "overwrite_output_dir"), _NAME),
    **dict.fromkeys(("seed", "data_seed"), _SEED),
    **dict.fromkeys(("report_to", "project", "disable_tqdm"), _TRACKERS),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config"), _WHOLE),
    **dict.fromkeys(("local_rank", "ddp_backend"), _RANKS),
    **dict.fromkeys(("fp16", "bf16", "bf16_full_eval", "fp16_full_eval"), _DTYPE),
    **dict.fromkeys(("resume_from_checkpoint", "save_only_model", "enable_jit_checkpoint"), _SAME_COMMAND),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "set data.train and data.eval"),
    "model_init_kwargs": _MODEL,
    "trust_remote_code": "set model.trust_remote_code",
}
"""Fields that asyncrl sets, and where the user says it."""
PREFIXES: Mapping[str, str] = {
    "hub_": _HUB,
    "push_to_hub": _HUB,
    "teacher_model_": _TEACHER,
    "trackio_": _TRACKERS,
    "vllm_": _VLLM,
    "use_vllm": _VLLM,
}
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
    "list": list,
    "dict": dict,
    "None": type(None),
}


def refused(name: str) -> str:
    """Say where the user sets what a field of TRL would; empty if the field is the user's."""
    return OURS.get(name) or next((why for start, why in PREFIXES.items() if name.startswith(start)), "")


def trl_takes_the_settings(stage: str, trl: Mapping[str, Any]) -> Iterator[Mistake]:
    """A rule: unknown fields and values of another type are found where TRL is installed."""
    known = fields_of(stage) if trl else None
    for name, value in trl.items():
        key, kind = f"trl.{name}", f"TRL's {TRAINERS[stage][1]}Config"
        if why := refused(name):
            yield Mistake((key,), f"{key} is refused: {why}")
        elif known is not None and name not in known:
            names = [one for one in known if not refused(one)]
            hint = did_you_mean(name, names, "huggingface.co/docs/trl lists them")
            yield Mistake((key,), f"{key} is no field of {kind}{hint}")
        elif known is not None and not _fits(value, known[name]):
            yield Mistake((key,), f"{key} is {shown(value)}; {kind} allows {known[name]}; correct the value")


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value is of an annotated type. Types other than the plain ones are left to TRL."""
    names = re.findall(r"[\w.]+", re.sub(r"\[[^|]*\]", "", annotation))
    if not set(names) <= _TYPES.keys():
        return True
    return any(isinstance(value, _TYPES[name]) for name in names) and (
        not isinstance(value, bool) or "bool" in names
    )


@functools.cache
def fields_of(stage: str) -> Mapping[str, str] | None:
    """Return the fields of the stage's config class, with their types; None where TRL is not installed."""
    module, name = TRAINERS[stage]
    places = (
        ("trl", "trainer", f"{module}_config.py"),
        ("trl", "trainer", "base_config.py"),
        ("transformers", "training_args.py"),
    )
    sources = [source_in(*place) for place in places]
    classes = {name: found for source in sources if source for name, found in fields_in(source).items()}
    if None in sources:
        return None
    fields: dict[str, str] = {}
    waiting = [f"{name}Config"]
    while waiting:
        bases, own = classes.get(waiting.pop(), ([], {}))
        fields = {**own, **fields}
        waiting += bases
    return fields
