"""Which fields of TRL's config classes the section `trl` of a stage may set: all but those that are ours."""

import functools
import re
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from asyncrl.config.base import Mistake
from asyncrl.config.library_fields import fields_in, misnamed, source_in
from asyncrl.config.wording import shown

# TRL's module with the config class of each stage, and the name of that class without `Config`.
TRAINERS: Mapping[str, tuple[str, str]] = {
    "sft": ("sft", "SFT"),
    "rm": ("reward", "Reward"),
    "dpo": ("dpo", "DPO"),
    "kto": ("kto", "KTO"),
    "distil": ("distillation", "Distillation"),
}
_NAME, _TRACKERS = "set run.root and run.name", "set telemetry"
_WHOLE = "each rank holds the whole model; for less memory set model.lora"
_HUB = "nothing is uploaded; `asyncrl export` makes a directory for `hf upload`"
_SAME_COMMAND = "the same command resumes a stage"
_VLLM = "TRL does not know the installed vLLM; for samples by vLLM train with `asyncrl up`"

OURS: Mapping[str, str] = {
    **dict.fromkeys(("output_dir", "run_name", "logging_dir", "overwrite_output_dir"), _NAME),
    **dict.fromkeys(("seed", "data_seed"), "set run.seed"),
    **dict.fromkeys(("report_to", "project", "disable_tqdm"), _TRACKERS),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config"), _WHOLE),
    **dict.fromkeys(("local_rank", "ddp_backend"), "set ranks"),
    **dict.fromkeys(("fp16", "bf16", "bf16_full_eval", "fp16_full_eval"), "set model.dtype"),
    **dict.fromkeys(("resume_from_checkpoint", "save_only_model", "enable_jit_checkpoint"), _SAME_COMMAND),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "set data.train and data.eval"),
    # A resume would begin with the first reference.
    "sync_ref_model": "TRL saves no moved reference; `asyncrl up` does (algorithm.kl.reference_decay)",
    "model_init_kwargs": "set model.path, model.revision and model.dtype",
    "trust_remote_code": "set model.trust_remote_code",
}
"""Fields that asyncrl sets, and where the user says it."""
PREFIXES: Mapping[str, str] = {
    "hub_": _HUB,
    "push_to_hub": _HUB,
    "teacher_model_": "set teacher.path and teacher.revision",
    "trackio_": _TRACKERS,
    "vllm_": _VLLM,
    "use_vllm": _VLLM,
}
# Types by their names in TRL's source; values of others are left to TRL.
_TYPES: Mapping[str, tuple[type, ...]] = {kind.__name__: (kind,) for kind in (bool, int, str, list, dict)} | {
    "float": (int, float),
    "None": (NoneType,),
}


def refused(name: str) -> str:
    """Say where the user sets what a field of TRL would; empty if the field is the user's."""
    return OURS.get(name) or next((why for start, why in PREFIXES.items() if name.startswith(start)), "")


def trl_takes_the_settings(stage: str, trl: Mapping[str, Any]) -> Iterator[Mistake]:
    """Find mistakes: unknown fields and values of another type are found where TRL is installed."""
    known, kind = fields_of(stage) if trl else {}, f"TRL's {TRAINERS[stage][1]}Config"
    yield from misnamed("trl", trl, refused, known, f"field of {kind}", "huggingface.co/docs/trl lists them")
    for name, value in trl.items():
        key, allowed = f"trl.{name}", (known or {}).get(name, "Any")
        types = set(re.findall(r"[\w.]+", re.sub(r"\[[^|]*\]", "", allowed)))
        fits = any(isinstance(value, _TYPES[one]) for one in types & _TYPES.keys())
        fits = fits and (not isinstance(value, bool) or "bool" in types)
        if types <= _TYPES.keys() and not fits and not refused(name):
            yield Mistake((key,), f"{key} is {shown(value)}; {kind} allows {allowed}; correct the value")


@functools.cache
def fields_of(stage: str) -> Mapping[str, str] | None:
    """Return the fields of the stage's config class, with their types; None where TRL is not installed."""
    module, name = TRAINERS[stage]
    places = (("trl", "trainer", f"{module}_config.py"), ("trl", "trainer", "base_config.py"))
    sources = [source_in(*place) for place in (*places, ("transformers", "training_args.py"))]
    if None in sources:
        return None
    classes = {name: found for source in sources if source for name, found in fields_in(source).items()}

    def of(name: str) -> dict[str, str]:
        bases, own = classes.get(name, ([], {}))
        return {field: kind for base in bases for field, kind in of(base).items()} | dict(own)

    return of(f"{name}Config")
