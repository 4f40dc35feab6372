"""Training among the tokens that `top_k`, `top_p` and `min_p` left: in the trainer, and in whole runs, where the
learner's probability of a token is that with which the engine sampled it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models import tiny_qwen2
from tests.support.ranks import Ranks, forked_ranks
from tests.support.trainer_worker import plain_loss
from tests.support.whole_run import rows, start, steps, tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

MEASURED = {"kept": True, "reference": True, "measured": ["logprobs_T", "reference_logprobs_T"]}
WAYS: dict[int, list[dict[str, Any]]] = {
    1: [
        {"stage": 0, "cut": [[[3], [0, 6, 1], [], [2, 4, 5]]]},
        {"stage": 3, "cut": [[[0, 1, 2, 3, 4, 5, 6]]], "checkpointing": True},
    ],
    2: [
        {"stage": 2, "cut": [[[0, 1, 2, 3, 4], [5]], [[6], []]]},
        {"stage": 3, "cut": [[[0, 1, 2, 3], [4, 5, 6]]] * 2, "sequence_parallel": 2},
    ],
}


@pytest.fixture(scope="module")
def learner() -> Iterator[Ranks]:
    with forked_ranks() as learner:
        yield learner


@pytest.mark.parametrize("ranks", WAYS)
def test_steps_and_measured_columns_are_those_of_a_softmax_among_the_kept_tokens(
    learner: Ranks, tmp_path: Path, ranks: int
) -> None:
    """The oracle is a stock model in float64; policy and reference have the same weights."""
    model = tiny_qwen2(tmp_path / "model")
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    loss = plain_loss(policy, kept=True)
    loss.backward()
    assert abs(float(loss.detach()) - float(plain_loss(policy).detach())) > 0.01
    scenarios = [
        {"run": "gradient", "name": str(index)} | MEASURED | way for index, way in enumerate(WAYS[ranks])
    ]
    for name, (gradients, report) in learner.run(ranks, model, scenarios, tmp_path).items():
        for parameter, expected in policy.named_parameters():
            torch.testing.assert_close(
                gradients[parameter].double(),
                expected.grad,
                atol=1e-6,
                rtol=1e-5,
                msg=lambda m, n=name, p=parameter: f"{n}: {p}: {m}",
            )
        assert report["metrics"]["loss"] == pytest.approx(float(loss.detach()), abs=1e-6), name
        found = [one for one in report["measured"] if one["logprobs_T"]]
        assert found and any(logprob == 0.0 for one in found for logprob in one["logprobs_T"])
        for one in found:
            assert one["reference_logprobs_T"] == pytest.approx(one["logprobs_T"], abs=1e-6), name


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with tiny_run(tmp_path) as path:
        yield path


# The tiny model has 43 tokens.
@pytest.mark.parametrize(("engine", "top_k"), [("transformers", 12), ("vllm", 50)])
def test_at_lag_0_every_ratio_is_1(config: Path, engine: str, top_k: int) -> None:
    """In steps of two minibatches and two epochs, with a reference."""
    run, output = config.parent / "runs" / "whole", config.parent / "up.out"
    keys = [
        f"sampling.top_k={top_k}",
        "sampling.top_p=0.9",
        "sampling.min_p=0.02",
        "sampling.temperature=0.8",
    ]
    keys += ["staleness.max_lag=0", "batch.minibatches=2", "batch.epochs=2", "algorithm.kl.coefficient=0.1"]
    keys += [
        f"generator.engine={engine}",
        "generator.count=1",
        "learner.steps=4",
        "algorithm.entropy.coefficient=0.01",
    ]
    assert start(config, *keys).wait(timeout=600) == 0, output.read_text()[-3000:]
    assert steps(run) == [1, 2, 3, 4]
    trained = [row for row in rows(run) if "mismatch/abs_log_ratio/max" in row]
    assert len(trained) == 4
    for row in trained:
        assert row["mismatch/abs_log_ratio/max"] < 1e-4
        assert row["policy/grad_norm"] > 0
    assert max(row.get("weights/moved", 0) for row in rows(run)) > 1e-4
