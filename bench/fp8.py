"""How far FP8 rounding moves the log-probabilities of the probe: the ground of `QUANTISED` in
asyncrl/weights/agreement.py, from an emulation that needs no GPU.

Linear layers round their weights (a scale per tensor) and inputs (a scale per token) to e4m3, attention its
keys and values (no scale). All else is computed in bfloat16, and the output layer in float32, as in a run. No
kernel of FP8 takes part. "fp8" is the difference to bfloat16 in nats; "bfloat16" that of bfloat16 to float32.

    python -m bench.fp8 --model MODEL [--model MODEL] [--json bench/results/fp8.json]
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import asyncrl  # noqa: F401 - before transformers: it hides builds that transformers cannot import

# isort: split
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncrl.config.sections import WeightsConfig
from asyncrl.data.prompts import draw_probe
from asyncrl.weights.agreement import Difference
from bench.environment import describe, report

E4M3 = torch.finfo(torch.float8_e4m3fn).max


def rounded(values: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """`values` as e4m3 holds them with a scale that broadcasts, in their own data type."""
    within = (values / scale).clamp(-E4M3, E4M3)
    return within.to(torch.float8_e4m3fn).to(values.dtype) * scale


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *arguments, **options):
    return sdpa_attention_forward(module, query, rounded(key), rounded(value), *arguments, **options)


def round_input(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    [hidden] = inputs
    return (rounded(hidden, hidden.abs().amax(-1, keepdim=True).clamp_min(1e-12) / E4M3),)


def as_fp8(model: Any) -> Any:
    """Make all linear layers but the output layer, and attention, round; changes `model`."""
    for layer in model.base_model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = rounded(layer.weight.data, layer.weight.data.abs().max() / E4M3)
            layer.register_forward_pre_hook(round_input)
    model.set_attn_implementation("e4m3")
    return model


@torch.no_grad()
def scores(model: Any, ids: tuple[int, ...]) -> Tensor:
    """Log-probabilities in nats of ids[1:]."""
    hidden = model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, :-1]
    logits = hidden.float() @ model.get_output_embeddings().weight.float().T
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)


def measure(path: Path, probes: int) -> dict[str, object]:
    def load(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()

    exact, plain, fp8 = load(torch.float32), load(torch.bfloat16), as_fp8(load(torch.bfloat16))
    found: dict[str, list[Difference]] = {"bfloat16": [], "fp8": []}
    for seed in range(probes):
        ids = draw_probe(seed, [WeightsConfig().probe_tokens], exact.config.vocab_size)[-1]
        base = scores(plain, ids)
        found["bfloat16"].append(Difference.between(base.numpy(), scores(exact, ids).tolist()))
        found["fp8"].append(Difference.between(scores(fp8, ids).numpy(), base.tolist()))
    row: dict[str, object] = {
        "model": path.name,
        "parameters": sum(one.numel() for one in exact.parameters()),
    }
    for name, differences in found.items():
        means = [one.mean for one in differences]
        row[name] = {
            "mean_least": round(min(means), 4),
            "mean_most": round(max(means), 4),
            "largest": round(max(one.max for one in differences), 3),
        }
    row["fp8_over_bfloat16"] = round(
        statistics.fmean(one.mean for one in found["fp8"])
        / statistics.fmean(one.mean for one in found["bfloat16"]),
        1,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--probes", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    AttentionInterface.register("e4m3", attend)
    AttentionMaskInterface.register("e4m3", sdpa_mask)
    rows = [measure(model, options.probes) for model in options.model]
    report(
        {**describe("asyncrl", "torch", "transformers"), "probes": options.probes, "rows": rows}, options.json
    )


if __name__ == "__main__":
    main()
