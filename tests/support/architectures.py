"""The two tables of architectures in docs/models.md: those that are right, and those that are refused.

python -m tests.support.architectures   # writes them
"""

import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from asyncrl.errors import ConfigError
from asyncrl.trainer.miniature import require_agreement

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HYBRID = {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4}
# What a model's config.json has, and the defaults of transformers lack.
MORE: dict[str, Any] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2": HYBRID,
    "lfm2_moe": HYBRID,
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
TABLE = """
afmoe apertus arcee bamba bitnet bloom codegen cohere cohere2 deepseek_v3 deepseek_v32 ernie4_5 exaone4 falcon
falcon_h1 falcon_mamba gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan_v1_dense jamba jetmoe kimi_linear
lfm2 lfm2_moe llama llama4_text mamba mamba2 minicpm3 minimax minimax_m2 ministral ministral3 mistral mixtral
moshi mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe
qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma rwkv seed_oss smollm3
stablelm starcoder2 vaultgemma xglm xlstm zamba zaya
"""
NAMES = TABLE.split()
ROW = re.compile(r"\| `(?P<name>[\w-]+)` \| (?P<nats>[\d.e-]*) \|(?: (?P<why>.*) \|)?")
RIGHT, REFUSED = "| right | nats |", "| refused | nats | where they differ, or what is missing |"
LAYER = re.compile(r"\((\w+)\) is the first to differ")


def judged(name: str) -> tuple[str, float | None, str]:
    """The verdict on an architecture with random weights, the largest difference in nats, and the reason."""
    try:
        nats = require_agreement(AutoConfig.for_model(name, **MORE.get(name, {})))
    except ConfigError as error:
        text = str(error)
        apart = re.search(r"by ([\d.e-]+) nats", text)
        layer = LAYER.search(text)
        if apart:
            return "refused", float(apart[1]), f"`{layer[1]}`" if layer else "the logits"
        why = text.removeprefix("model: ").partition(";")[0]
        return (
            "refused",
            None,
            re.sub(r"^the code of \w+ ", "", why).partition(": ")[0].partition(", which")[0],
        )
    assert nats is not None, f"{name} has no miniature"
    return "right", nats, ""


def rows() -> dict[str, dict[str, str]]:
    """The rows as they stand in the page, by architecture."""
    found = {row["name"]: row for row in map(ROW.fullmatch, PAGE.read_text().splitlines()) if row}
    return {
        name: {
            "verdict": "right" if row["why"] is None else "refused",
            "nats": row["nats"],
            "why": row["why"] or "",
        }
        for name, row in found.items()
    }


def write() -> None:
    head = PAGE.read_text().partition(RIGHT)[0]
    right, refused = [RIGHT, "|---|---|"], [REFUSED, "|---|---|---|"]
    for name in NAMES:
        verdict, nats, why = judged(name)
        number = "" if nats is None else f"{nats:.2g}"
        if verdict == "right":
            right.append(f"| `{name}` | {number} |")
        else:
            refused.append(f"| `{name}` | {number} | {why} |")
    PAGE.write_text(head + "\n".join([*right, "", *refused]) + "\n")


if __name__ == "__main__":
    write()
