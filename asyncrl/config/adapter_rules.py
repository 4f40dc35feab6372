"""Rules of `model.lora`: with which settings a run can train an adapter, and keep its base in 4 bits."""

from collections.abc import Iterator

from asyncrl.config.base import Mistake, broken
from asyncrl.config.run_fields import RunFields


def adapter_fits_its_base(run: RunFields) -> Iterator[Mistake]:
    """A rule: generators can begin as the learner does, and nothing needs the whole numbers of 4 bits."""
    lora, key = run.model.lora, "model.lora.load_in_4bit"
    if lora is None:
        return
    if lora.start is not None and lora.sync == "merged":
        text = "model.lora.start is set, but model.lora.sync is merged: generators begin with model.path "
        text += "alone; set sync: adapter, or merge the adapter into the model, and give that as model.path"
        yield broken("model.lora.sync model.lora.start", text)
    on_vllm, given = run.generator.engine == "vllm", run.generator.vllm.get("quantization")
    is_other = on_vllm and given not in (None, "bitsandbytes")
    for is_wrong, other, text in (
        (lora.sync == "merged", "model.lora.sync", "is merged, which sends whole weights; set sync: adapter"),
        (run.learner.zero_stage == 3, "learner.zero_stage", "is 3, which cannot cut them; set at most 2"),
        (is_other, "generator.vllm", f"has quantization: {given}, another base; drop one of them"),
        (
            on_vllm and run.model.dtype != "bfloat16",
            "model.dtype",
            f"is {run.model.dtype}, and vLLM computes with such weights in bfloat16; set it to that, or "
            "generator.engine: transformers",
        ),
    ):
        if lora.load_in_4bit and is_wrong:
            yield broken(f"{key} {other}", f"{key} is true, but {other} {text}")
