"""Resume is exact: a run that a fresh process loads ends with the same bits as one that was not stopped."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.algorithm import OptimizerConfig
from asyncrl.config.named_files import EXPORT
from asyncrl.trainer.rates import rate_share
from tests.support.models import tiny_qwen2
from tests.support.ranks import Ranks, forked_ranks
from tests.support.trainer_worker import RATES, RUN_STEPS

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def learner() -> Iterator[Ranks]:
    with forked_ranks() as learner:
        yield learner


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype", "offload"),
    [
        (1, 0, "float32", False),
        (2, 0, "float32", False),
        (2, 2, "float32", False),
        (2, 3, "bfloat16", False),
        (2, 3, "bfloat16", True),
    ],
)
def test_four_steps_are_two_steps_a_fresh_process_and_two_more(
    learner: Ranks, tmp_path: Path, ranks: int, stage: int, dtype: str, offload: bool
) -> None:
    model, store = tiny_qwen2(tmp_path / "model"), tmp_path / "[lr1e-6]"
    base: dict[str, Any] = {"run": "train", "stage": stage, "dtype": dtype, "critic": True, "reference": True}
    base["offload"] = offload
    saved = base | {"store": str(store)}
    first = learner.run(
        ranks,
        model,
        [base | {"name": "whole", "steps": [0, 5]}, saved | {"name": "begun", "steps": [0, 2]}],
        tmp_path / "first",
    )
    second = learner.run(ranks, model, [saved | {"name": "resumed", "steps": [2, 5]}], tmp_path / "second")

    (whole, whole_report), (begun, begun_report), (resumed, report) = (
        first["whole"],
        first["begun"],
        second["resumed"],
    )
    assert report["state"] == {"version": 2, "ledger": [1, 2]}
    for column in ("losses", "rates"):
        assert begun_report[column] + report[column] == whole_report[column]
    share = rate_share(**OptimizerConfig(**RATES).rates(RUN_STEPS))
    rates = [RATES["lr"] * share(step) for step in range(5)]
    assert whole_report["rates"] == [rate for rate in rates for _ in ("policy", "critic")]
    assert whole.keys() == resumed.keys()
    assert {name.partition(".")[0] for name in whole} == {"policy", "critic", "reference"}
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
        assert not torch.equal(begun[name], tensor), name

    exported = store / "step-000002" / EXPORT
    served = dict(
        AutoModelForCausalLM.from_pretrained(exported, dtype=getattr(torch, dtype)).named_parameters()
    )
    policy = {
        name.removeprefix("policy.model."): tensor
        for name, tensor in begun.items()
        if name.startswith("policy.")
    }
    assert served.keys() == policy.keys()
    assert all(torch.equal(served[name].detach(), tensor) for name, tensor in policy.items())
    assert AutoTokenizer.from_pretrained(exported).encode("12+34") == AutoTokenizer.from_pretrained(
        model
    ).encode("12+34")
    rng = {path.name for path in (store / "step-000002").glob("rng-*")}
    assert rng == {f"rng-{rank:04}.safetensors" for rank in range(ranks)}
    assert not list(store.rglob("latest"))


def test_another_layout_is_refused_with_what_to_do(learner: Ranks, tmp_path: Path) -> None:
    model, store = tiny_qwen2(tmp_path / "model"), tmp_path / "store"
    base = {"run": "train", "stage": 0, "store": str(store)}
    full = {"critic": True, "reference": True}
    learner.run(1, model, [base | full | {"name": "begun", "steps": [0, 1]}], tmp_path / "first")
    written = json.loads((store / "step-000001" / "trainer.json").read_text())
    assert written == {
        "ranks": 1,
        "zero_stage": 0,
        "dtype": "float32",
        "critic": True,
        "lora": None,
        "moved_reference": True,
        "offload_optimizer": False,
        "optimizer_steps": 1,
        "optimizers": ["adamw", "adamw"],
    }
    for ranks, models, found in [(2, full, "'ranks': 1"), (1, {"reference": True}, "'critic': True")]:
        with pytest.raises(
            AssertionError, match=f"ConfigError: .*{found}.*resume with the same learner.ranks"
        ):
            learner.run(
                ranks,
                model,
                [base | models | {"name": "resumed", "steps": [1, 2]}],
                tmp_path / f"second {found}",
            )
    with pytest.raises(AssertionError, match=r"ConfigError: .*would be lost; keep algorithm.kl.coefficient"):
        learner.run(
            1,
            model,
            [base | {"critic": True, "name": "resumed", "steps": [1, 2]}],
            tmp_path / "without a reference",
        )


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype"), [(1, 0, "float32"), (2, 2, "float32"), (2, 3, "bfloat16")]
)
def test_a_resumed_optimizer_has_the_numbers_of_today(
    learner: Ranks, tmp_path: Path, ranks: int, stage: int, dtype: str
) -> None:
    """Loaded and not: the learning rate, its warm-up and the rest are those of the config that resumes."""
    model, base = (
        tiny_qwen2(tmp_path / "model"),
        {"run": "train", "stage": stage, "dtype": dtype, "critic": True},
    )
    saved, still = (
        base | {"store": str(tmp_path / "store")},
        {
            "lr": 1e-30,
            "weight_decay": 0.0,
            "warmup_steps": 5,
            "eps": 1e-3,
            "max_grad_norm": 0.25,
            "schedule": "constant",
            "schedule_arguments": {},
        },
    )
    learner.run(ranks, model, [saved | {"name": "begun", "steps": [0, 2]}], tmp_path / "first")
    scenarios = [
        saved | {"name": "none", "steps": [2, 2]},
        saved | {"name": "still", "steps": [2, 4], "optimizer": still},
    ]
    results = learner.run(ranks, model, scenarios, tmp_path / "second")
    tensors, report = results["still"]
    assert all(torch.equal(tensor, results["none"][0][name]) for name, tensor in tensors.items()), (
        "steps of 1e-30 change nothing"
    )
    for numbers in report["numbers"]:  # of the policy and of the critic
        assert {name: numbers[name] for name in ("eps", "weight_decay", "initial_lr", "clip_grad")} == {
            "eps": 1e-3, "weight_decay": 0.0, "initial_lr": 1e-30, "clip_grad": 0.25
        }  # fmt: skip
        assert numbers["lr"] == pytest.approx(1e-30), (
            "four steps of before and now, and the fifth is the first of the full rate"
        )


@pytest.mark.parametrize(("before", "now"), [(3, 1), (1, 2)])
def test_a_resume_with_another_number_of_optimizer_steps_keeps_its_place_in_the_schedule(
    learner: Ranks, tmp_path: Path, before: int, now: int
) -> None:
    model = tiny_qwen2(tmp_path / "model")
    base = {"run": "train", "stage": 0, "critic": True, "store": str(tmp_path / "store")}
    begun = base | {"name": "begun", "steps": [0, 3], "optimizer_steps": before}
    learner.run(1, model, [begun], tmp_path / "first")
    resumed = base | {"name": "resumed", "steps": [3, 4], "optimizer_steps": now}
    report = learner.run(1, model, [resumed], tmp_path / "second")["resumed"][1]
    share = rate_share(**OptimizerConfig(**RATES).rates(RUN_STEPS * now))
    assert report["rates"] == [RATES["lr"] * share(3 * now // before)] * 2


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_a_full_disk_of_one_rank_is_an_error_on_all_and_the_next_save_works(
    learner: Ranks, tmp_path: Path, ranks: int, stage: int
) -> None:
    """Every file is the first that does not fit: the ranks still meet in every collective."""
    limits = [1, 3_000, 20_000, 200_000]
    scenario = {
        "name": "full",
        "run": "full_disk",
        "stage": stage,
        "store": str(tmp_path / "store"),
        "limits": limits,
        "critic": True,
    }
    errors = learner.run(ranks, tiny_qwen2(tmp_path / "model"), [scenario], tmp_path / "out")["full"][1]
    assert len(errors) >= 3 and all(
        f"rank {ranks - 1}:" in error and "could not be written" in error for error in errors
    )
    assert not list((tmp_path / "store").glob(".writing-*"))


def test_a_frozen_reference_is_not_saved_and_may_be_switched_on_and_off(
    learner: Ranks, tmp_path: Path
) -> None:
    model, store = tiny_qwen2(tmp_path / "model"), tmp_path / "store"
    base = {"run": "train", "stage": 0, "store": str(store), "decay": None}
    learner.run(1, model, [base | {"name": "begun", "steps": [0, 1], "reference": True}], tmp_path / "first")
    assert not (store / "step-000001" / "reference").exists()
    scenarios = [base | {"name": f"resumed {on}", "steps": [1, 2], "reference": on} for on in (True, False)]
    results = learner.run(1, model, scenarios, tmp_path / "second")
    loaded = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    tensors = results["resumed True"][0]
    assert all(
        torch.equal(tensors[f"reference.model.{name}"], tensor.detach()) for name, tensor in loaded.items()
    )
    assert all(torch.equal(tensors[name], tensor) for name, tensor in results["resumed False"][0].items())
