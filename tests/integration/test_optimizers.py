"""Every optimizer takes the step that its library takes on one process, and goes on exactly after a resume."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Adafactor, AutoModelForCausalLM

from tests.support.libraries import with_bitsandbytes
from tests.support.models import tiny_qwen2
from tests.support.ranks import Ranks, forked_ranks
from tests.support.trainer_worker import plain_loss

ADAM: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6, "betas": (0.9, 0.99)}
CLIPPED = {"max_grad_norm": 0.5}
ANY_STAGE = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16"), (3, "bfloat16")]
LAYOUTS = {
    "adamw": ANY_STAGE,
    "adamw_8bit": ANY_STAGE,
    "muon": [(0, "float32"), (1, "bfloat16")],
    "adafactor": [(0, "float32")],
}
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with with_bitsandbytes(tmp_path_factory.mktemp("python")), forked_ranks() as learner:
        yield learner


def by_the_library(kind: str, model: Path) -> dict[str, Tensor]:
    """What one step of a stock model adds to its parameters in float32, with a stock optimizer.

    AdamW in 8 bits rounds its moments after the step, so its first step is AdamW's.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain_loss(policy).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIPPED["max_grad_norm"])
    rates = {name: ADAM[name] for name in ("lr", "weight_decay")}
    named = dict(policy.named_parameters())
    begun = {name: each.detach().clone() for name, each in named.items()}
    matrices = [each for name, each in named.items() if ".layers." in name and each.ndim == 2]
    rest = [each for name, each in named.items() if ".layers." not in name or each.ndim != 2]
    if kind == "muon":
        torch.optim.Muon(matrices, **rates, adjust_lr_fn="match_rms_adamw").step()
        torch.optim.AdamW(rest, **ADAM).step()
    elif kind == "adafactor":
        Adafactor(named.values(), **rates, scale_parameter=False, relative_step=False).step()
    else:
        torch.optim.AdamW(named.values(), **ADAM).step()
    return {name: each.detach() - begun[name] for name, each in named.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_step_is_that_of_the_library(
    learner: Ranks, tmp_path: Path, kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 gradients are rounded, and so is what is published: vectors of ones do not move.

    Muon raises the small singular values of a gradient, where rounding is most of it, to those of the rest.
    """
    model, optimizer = tiny_qwen2(tmp_path / "model", tied=False), ADAM | CLIPPED | {"kind": kind}
    begun = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    scenarios = [
        {"run": "stepped", "name": f"{stage} {dtype}", "stage": stage, "dtype": dtype, "optimizer": optimizer}
        for stage, dtype in LAYOUTS[kind]
    ]
    results = learner.run(ranks, model, scenarios, tmp_path / "out")
    # torch.optim.Muon orthogonalizes in bfloat16.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.float().clone())
    expected = by_the_library(kind, model)
    for layout, (found, report) in results.items():
        exact = layout.endswith("float32")
        assert report["lr"] == ADAM["lr"] and report["grad_norm"] > CLIPPED["max_grad_norm"]
        assert found.keys() == expected.keys()
        for name, step in expected.items():
            if not exact and step.ndim == 1:
                continue
            taken = found[name].float() - begun[name].detach()
            apart, size = float((taken - step).norm() / step.norm()), float(taken.norm() / step.norm())
            exact_to, half_to = (5e-3, 0.5) if kind == "muon" else (1e-4, 0.1)
            assert apart < (exact_to if exact else half_to), (layout, name, apart)
            assert size == pytest.approx(1, abs=exact_to if exact else 0.1), (layout, name, size)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_resumed_run_ends_with_the_same_bits_and_other_states_are_refused(
    learner: Ranks, tmp_path: Path, kind: str
) -> None:
    model, base, stores = (
        tiny_qwen2(tmp_path / "model"),
        {"run": "train", "critic": True},
        tmp_path / "stores",
    )
    whole, begun, resumed = [], [], []
    for stage, dtype in LAYOUTS[kind]:
        one = base | {"stage": stage, "dtype": dtype, "optimizer": {"kind": kind}}
        name = f"{stage} {dtype}"
        saved = one | {"store": str(stores / name)}
        whole.append(one | {"name": f"{name} whole", "steps": [0, 4]})
        begun.append(saved | {"name": name, "steps": [0, 2]})
        resumed.append(saved | {"name": name, "steps": [2, 4]})
    first = learner.run(2, model, whole + begun, tmp_path / "first")
    for name, (tensors, report) in learner.run(2, model, resumed, tmp_path / "second").items():
        expected, all_of = first[f"{name} whole"]
        assert first[name][1]["losses"] + report["losses"] == all_of["losses"]
        assert first[name][1]["rates"] + report["rates"] == all_of["rates"]
        assert all(torch.equal(tensors[each], tensor) for each, tensor in expected.items()), name
    other = "adafactor" if kind == "adamw" else "adamw"
    with pytest.raises(
        AssertionError, match=f"ConfigError: .*'optimizers': ..{kind}.*learner.optimizer.kind"
    ):
        learner.run(2, model, [resumed[0] | {"optimizer": {"kind": other}}], tmp_path / "third")
