"""Long context: ranks that divide sequences make the same steps as one rank, on real processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import tiny_qwen2
from tests.support.ranks import Ranks, Results, forked_ranks

pytestmark = pytest.mark.integration

# One step for each: all aggregations, both placements of the KL, and all columns that can be measured.
ALGORITHMS: list[dict[str, Any]] = [
    {"advantage": "gae", "aggregation": "token-mean", "kl": {"coefficient": 0.2, "reference_decay": 0.5}},
    {"advantage": "gae", "aggregation": "token-sum", "kl": {"coefficient": 0.2, "placement": "reward"}},
    {"advantage": "gae", "aggregation": "seq-mean-token-sum", "entropy": {"coefficient": 0.1}},
    {"advantage": "optimal_token_baseline", "aggregation": "seq-mean-token-mean"},
    {"aggregation": {"name": "seq-mean-token-sum-norm", "scale": 30.0}, "proximal": "log_linear"},
]
BASE: dict[str, Any] = {"run": "recipes", "critic": True, "reference": True, "algorithms": ALGORITHMS}
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "algorithms": ALGORITHMS[:1]}

Result = tuple[dict[str, Tensor], Any]


@pytest.fixture(scope="module")
def learner() -> Iterator[Ranks]:
    with forked_ranks() as learner:
        yield learner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks divide its four heads, but not its two of keys and values."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_qwen2(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(scope="module")
def alone(learner: Ranks, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By dtype."""
    scenarios = [
        BASE | {"name": "float32", "stage": 0, "budget": 1000},
        BASE | {"name": "bfloat16", "stage": 1, "budget": 1000} | BFLOAT16,
    ]
    return learner.run(1, model, scenarios, tmp_path_factory.mktemp("alone"))


def assert_equal(name: str, found: Result, alone: Result, *, atol: float = 1e-6, rtol: float = 1e-5) -> None:
    """The metrics are those of the last steps."""
    (tensors, report), (expected, of_one) = found, alone
    for key in tensors:
        torch.testing.assert_close(
            tensors[key], expected[key], atol=atol, rtol=rtol / 10, msg=lambda m, k=key: f"{name}: {k}: {m}"
        )
    assert report["score"] == pytest.approx(of_one["score"], abs=atol, rel=rtol / 10), name
    assert report["plain"] == pytest.approx(report["score"], abs=max(atol, 1e-5), rel=rtol / 10), name
    for step, one in zip(report["steps"], of_one["steps"][-len(report["steps"]) :], strict=True):
        # Rounding errors of a sequence's tokens add up before the exponential of its divergences.
        assert step == pytest.approx(one, rel=rtol, abs=10 * rtol), name


WAYS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"stage": 0, "budget": 1000},
        {"stage": 3, "budget": 50, "checkpointing": True},
        {"stage": 2, "budget": 50} | BFLOAT16,
    ],
    4: [
        {"stage": 1, "budget": 50, "sequence_parallel": 4},
        {"stage": 2, "budget": 50, "checkpointing": True},
        {"stage": 3, "budget": 1000, "checkpointing": "selective", "sequence_parallel": 4},
    ],
}


@pytest.mark.parametrize("ranks", WAYS)
def test_ranks_that_divide_sequences_make_the_steps_of_one_rank(
    learner: Ranks, model: Path, alone: Results, tmp_path: Path, ranks: int
) -> None:
    scenarios = [
        BASE | {"name": f"stage {way['stage']}", "sequence_parallel": 2} | way for way in WAYS[ranks]
    ]
    results = learner.run(ranks, model, scenarios, tmp_path)
    for scenario in scenarios:
        name, dtype = scenario["name"], scenario.get("dtype", "float32")
        assert results[name][0].keys() == alone[dtype][0].keys()
        assert results[name][1]["flops"] == pytest.approx(alone[dtype][1]["flops"], abs=ranks) != 0
        rounded = {} if dtype == "float32" else {"atol": 0.02, "rtol": 0.03}
        assert_equal(name, results[name], alone[dtype], **rounded)


def test_a_checkpoint_goes_on_with_another_number_of_ranks_per_sequence(
    learner: Ranks, model: Path, alone: Results, tmp_path: Path
) -> None:
    half = BASE | {"stage": 2, "budget": 50}
    store = str(tmp_path / "store")
    begun = half | {"name": "begun", "algorithms": ALGORITHMS[:2], "save": store}
    resumed = half | {"name": "resumed", "algorithms": ALGORITHMS[2:], "first": 2}
    resumed |= {"load": store, "sequence_parallel": 2}
    found = learner.run(2, model, [begun, resumed], tmp_path)["resumed"]
    assert_equal("resumed", found, alone["float32"])
