"""`asyncrl plan` counts what policy and critic take under DeepSpeed, to 10 %."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import tiny_qwen2
from tests.support.ranks import forked_ranks

pytestmark = pytest.mark.integration

KINDS = [(1, "bfloat16"), (3, "bfloat16"), (2, "float32"), (3, "float32"), (1, "float32"), (2, "bfloat16")]


@pytest.mark.parametrize(("ranks", "kinds"), [(2, KINDS[:2]), (2, KINDS[2:]), (1, KINDS[:4])])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"num_hidden_layers": 4}, id="deep"),
        pytest.param({"num_hidden_layers": 2, "vocab_size": 16384}, id="wide output layer"),
        pytest.param({"num_hidden_layers": 2, "vocab_size": 16384, "tied": False}, id="untied"),
    ],
)
def test_a_rank_takes_what_is_planned_and_the_critic_keeps_its_own(
    tmp_path: Path, ranks: int, kinds: list[tuple[int, str]], sizes: dict[str, Any]
) -> None:
    # Large against the activations, and against what DeepSpeed keeps gathered because it is small.
    model = tiny_qwen2(tmp_path / "model", hidden_size=256, intermediate_size=1024, **sizes)
    scenarios = [
        {"run": "memory", "name": f"ZeRO {stage} {dtype}", "stage": stage, "dtype": dtype, "critic": True}
        for stage, dtype in kinds
    ]
    with forked_ranks() as learner:
        results = learner.run(ranks, model, scenarios, tmp_path)
    for name, (_, report) in results.items():
        plan = report["plan"]
        assert report["resting"] == pytest.approx(report["policy"] + plan["critic"], rel=0.1), name
        assert report["peak"] == pytest.approx(sum(plan.values()), rel=0.1), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_takes_what_is_planned_for_its_optimizer(tmp_path: Path, ranks: int) -> None:
    model = tiny_qwen2(tmp_path / "model", hidden_size=256, intermediate_size=1024, vocab_size=2048)
    scenarios = [
        {"run": "memory", "name": f"{kind} {dtype}", "stage": stage, "dtype": dtype, "critic": True}
        | {"optimizer": {"kind": kind}}
        for kind, stage, dtype in (
            ("muon", 0, "float32"),
            ("muon", 1, "bfloat16"),
            ("adafactor", 0, "float32"),
        )
    ]
    with forked_ranks() as learner:
        results = learner.run(ranks, model, scenarios, tmp_path)
    for name, (_, report) in results.items():
        plan, kept = report["plan"], report["resting"] / 2
        if name.endswith("float32"):  # weights are mapped from their file
            rel = 0.2 if name.startswith("adafactor") else 0.02
            assert kept == pytest.approx(plan["optimizer"], rel=rel), name
        else:
            assert kept == pytest.approx(plan["critic"], rel=0.02), name
