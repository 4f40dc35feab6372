"""A mixture of experts in the trainer, with the experts that an engine chose, on one and more real ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.by_hand import ByHand
from tests.support.models import model_of, tiny_moe
from tests.support.ranks import Ranks, forked_ranks
from tests.support.trainer_worker import chosen, plain_loss, sequences

pytestmark = pytest.mark.integration

CUTS = {1: [[[3], [0, 6, 1], [], [2, 4, 5]]], 2: [[[0, 1, 2, 3, 4], [5], []], [[6], [], []]]}


@pytest.fixture(scope="module")
def learner() -> Iterator[Ranks]:
    with forked_ranks() as learner:
        yield learner


@pytest.mark.parametrize(("ranks", "together"), [(1, 1), (2, 1), (2, 2)])
def test_the_gradient_with_given_experts_is_that_of_a_forward_pass_by_hand(
    learner: Ranks, tmp_path: Path, ranks: int, together: int
) -> None:
    path = tiny_moe(tmp_path / "model")
    model = model_of(path)
    loss = plain_loss(ByHand(model, chosen(sequences())))
    loss.backward()
    cut = CUTS[1] * 2 if together == 2 else CUTS[ranks]
    plain: dict[str, Any] = {"run": "gradient", "cut": cut, "experts": True, "sequence_parallel": together}
    scenarios = [plain | {"name": f"stage {stage}", "stage": stage} for stage in (0, 3)]
    scenarios += [plain | {"name": "again", "stage": 3, "checkpointing": True}]
    exported = tmp_path / "exported"
    scenarios[1]["export"] = str(exported)
    for name, (gradients, report) in learner.run(ranks, path, scenarios, tmp_path).items():
        for parameter, expected in model.named_parameters():
            torch.testing.assert_close(
                gradients[parameter].float(),
                expected.grad,
                atol=1e-6,
                rtol=1e-5,
                msg=lambda m, n=f"{name}: {parameter}": f"{n}: {m}",
            )
        assert report["metrics"]["loss"] == pytest.approx(float(loss.detach()), abs=1e-6), name
    assert tensors_of(exported) == tensors_of(path)


def tensors_of(directory: Path) -> set[str]:
    """The names of a checkpoint, where every expert is by itself."""
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in names
    return names
