"""The trainer on one and two real ranks against a plain torch loop, for every cut and every ZeRO stage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.models import tiny_qwen2
from tests.support.ranks import Ranks, forked_ranks
from tests.support.trainer_worker import plain_loss, sequences, tokens_of

pytestmark = pytest.mark.integration

CUTS = {
    "whole": [[[0, 1, 2, 3, 4, 5, 6]]],
    "cut": [[[3], [0, 6, 1], [], [2, 4, 5]]],
    "even": [[[0, 1], [2, 3]], [[4], [5, 6]]],
    "uneven": [[[0, 1, 2, 3, 4], [5], []], [[6], [], []]],
    "rank 1 empty": [[[0, 1, 2, 3, 4, 5, 6]], [[]]],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learner() -> Iterator[Ranks]:
    with forked_ranks() as learner:
        yield learner


def oracle(model: Path) -> tuple[dict[str, Tensor], float]:
    """Gradient and loss of a stock model."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loss = plain_loss(policy)
    loss.backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}, float(loss.detach())


@pytest.mark.parametrize(("ranks", "tied"), [(1, True), (2, True), (2, False)])
def test_the_gradient_depends_neither_on_ranks_nor_stage_nor_cut(
    learner: Ranks, tmp_path: Path, ranks: int, tied: bool
) -> None:
    model = tiny_qwen2(tmp_path / "model", tied=tied)
    expected, loss = oracle(model)
    scenarios: list[dict[str, Any]] = [
        {"run": "gradient", "name": f"{cut}, stage {stage}", "stage": stage, "cut": parts}
        for cut, parts in CUTS.items()
        if len(parts) == ranks
        for stage in range(4)
    ]
    scenarios += [
        scenarios[-1] | {"name": f"checkpointing {setting}", "checkpointing": setting}
        for setting in (True, "selective")
    ]
    scenarios.append(scenarios[0] | {"name": "offloaded", "stage": 3, "offload": True})
    norm = float(torch.cat([gradient.flatten() for gradient in expected.values()]).norm())
    for name, (gradients, report) in learner.run(ranks, model, scenarios, tmp_path).items():
        assert report["names"] == list(expected), name
        for parameter, gradient in expected.items():
            torch.testing.assert_close(
                gradients[parameter].float(),
                gradient,
                atol=1e-6,
                rtol=1e-5,
                msg=lambda m, n=name, p=parameter: f"{n}: {p}: {m}",
            )
        assert report["grad_norm"] == pytest.approx(norm, rel=1e-5), name
        assert report["metrics"]["loss"] == pytest.approx(loss, abs=1e-6), name
        assert report["metrics"]["tokens"] == tokens_of(sequences()), name
        assert report["metrics"]["skipped_steps"] == 0, name


CLIPPED = [
    *((stage, "float32", False) for stage in range(4)),
    (3, "float32", True),
    *((stage, "bfloat16", False) for stage in range(4)),
    (3, "bfloat16", True),
]


@pytest.mark.parametrize(("ranks", "cut"), [(2, "uneven"), (1, "cut")])
def test_a_gradient_above_max_grad_norm_is_scaled_as_a_whole(
    learner: Ranks, model: Path, tmp_path: Path, ranks: int, cut: str
) -> None:
    expected, _ = oracle(model)
    whole = torch.cat([gradient.flatten() for gradient in expected.values()])
    most = float(whole.norm()) / 8
    scenarios: list[dict[str, Any]] = [
        {"run": "gradient", "name": f"{stage} {dtype} {offload}", "cut": CUTS[cut], "max_grad_norm": most}
        | {"stage": stage, "dtype": dtype, "offload": offload}
        # A step much larger than the weights, so that their rounding hides nothing of it.
        | ({"lr": 1e3} if dtype == "bfloat16" else {})
        for stage, dtype, offload in CLIPPED
    ]
    for name, (gradients, report) in learner.run(ranks, model, scenarios, tmp_path).items():
        # Relative to the norm of what it is compared with; bfloat16 rounds activations to 8 bits.
        tolerance = 0.03 if "bfloat16" in name else 1e-4
        found = torch.cat([gradients[parameter].float().flatten() for parameter in expected])
        assert report["grad_norm"] == pytest.approx(float(whole.norm()), rel=tolerance), name
        assert float((found - whole / 8).norm()) <= tolerance * most, name
        assert float(found.norm()) == pytest.approx(most, rel=min(tolerance, 0.01)), name


@pytest.mark.parametrize(("ranks", "cut"), [(1, "cut"), (2, "uneven")])
def test_gradients_that_are_summed_in_float32_reach_the_optimizer_in_float32(
    learner: Ranks, model: Path, tmp_path: Path, ranks: int, cut: str
) -> None:
    """In bfloat16 without shards of gradients; DeepSpeed would round the sums once more."""
    scenarios: list[dict[str, Any]] = [
        {"run": "accumulated", "name": str(stage), "stage": stage, "dtype": "bfloat16", "cut": CUTS[cut]}
        for stage in (0, 1)
    ]
    for name, (_, lost) in learner.run(ranks, model, scenarios, tmp_path).items():
        assert lost > 1e-4, name


# ZeRO stage, data type, whether the optimizer is in host memory: the two that differ most come first.
KINDS = [
    (0, "float32", False),
    (3, "bfloat16", True),
    (1, "float32", False),
    (2, "float32", False),
    (3, "float32", False),
    (2, "bfloat16", False),
]


@pytest.mark.parametrize(("ranks", "kinds"), [(2, KINDS[:2]), (2, KINDS[2:]), (1, KINDS)])
def test_a_non_finite_step_changes_nothing_on_any_rank_and_is_counted(
    learner: Ranks, model: Path, tmp_path: Path, ranks: int, kinds: list[tuple[int, str, bool]]
) -> None:
    scenarios = [
        {
            "run": "nonfinite",
            "name": f"{bad} {stage} {dtype} {offload}",
            "stage": stage,
            "dtype": dtype,
            "offload": offload,
            "bad": bad,
            "with_bad": bad != "never",
        }
        for stage, dtype, offload in kinds
        for bad in ("never", "nan", "inf", "gradient")
    ]
    results = learner.run(ranks, model, scenarios, tmp_path)
    for scenario in scenarios:
        if not scenario["with_bad"]:
            continue
        states, reports = results[scenario["name"]]
        clean, clean_reports = results[f"never {scenario['stage']} {scenario['dtype']} {scenario['offload']}"]
        assert [report["skipped"] for report in reports] == [0, 1, 0], scenario["name"]
        assert [report["finite"] for report in reports] == [True, False, True], scenario["name"]
        # The schedule does not count it either.
        assert (
            [reports[i]["lr"] for i in (0, 2)]
            == [report["lr"] for report in clean_reports]
            == pytest.approx([0.0025, 0.005])
        )
        for key, tensor in clean.items():
            index, parameter = key.split(".", 1)
            assert torch.equal(states[f"{int(index) * 2}.{parameter}"], tensor), (scenario["name"], key)
            if index == "0":
                assert torch.equal(states[f"1.{parameter}"], tensor), (scenario["name"], key)


def test_below_stage_3_an_offloaded_optimizer_does_not_recover_from_a_step_that_is_not_finite(
    learner: Ranks, model: Path, tmp_path: Path
) -> None:
    """The reason for which the config refuses it; if this fails, DeepSpeed has learned it."""
    scenario = {"run": "nonfinite", "name": "found", "stage": 2, "dtype": "bfloat16", "offload": True}
    _, reports = learner.run(1, model, [scenario | {"bad": "nan", "with_bad": True}], tmp_path)["found"]
    assert [report["skipped"] for report in reports] == [0, 1, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_logprobs_reference_score_and_broadcast(
    learner: Ranks, model: Path, tmp_path: Path, ranks: int
) -> None:
    scenarios = [
        {"run": "surface", "name": f"{stage} {dtype}", "stage": stage, "dtype": dtype, "reference": True}
        for stage, dtype in [(0, "float32"), (2, "float32"), (3, "float32"), (0, "bfloat16"), (3, "bfloat16")]
    ]
    results = learner.run(ranks, model, scenarios, tmp_path)
    for name, (tensors, report) in results.items():
        assert torch.equal(tensors["before"], tensors["reference"]), name
        assert torch.equal(tensors["still"], tensors["reference"]), name
        assert not torch.allclose(tensors["after"], tensors["before"], atol=1e-3), name
        assert report["broadcast"] == [True, True] and report["empty"] == 0, name
        # Transformers, on the trained and possibly sharded weights; it leaves the learner as it was.
        rounding = 1e-5 if "float32" in name else 0.03
        assert report["plain"] == pytest.approx(report["score"], abs=rounding) and report["as_before"], name
        assert report["specs"], f"{name}: `specs` describes other tensors than `parameters` yields"
        assert report["none"] == [1.0, 0.0] and not report["with_gradient"], name
        assert (
            report["dtype"] == [f"torch.{name.split()[1]}"] and report["logprob_dtype"] == "torch.float32"
        ), name
    for name in ("2 float32", "3 float32"):
        assert results[name][1]["score"] == pytest.approx(results["0 float32"][1]["score"], abs=1e-5)


def test_a_teacher_of_another_size_is_measured_as_if_it_were_the_policy(
    learner: Ranks, model: Path, tmp_path: Path
) -> None:
    teacher = tiny_qwen2(tmp_path / "teacher", seed=3, num_hidden_layers=3, hidden_size=32)
    scenarios = [
        {"run": "surface", "name": f"{stage} {dtype}", "stage": stage, "dtype": dtype}
        for stage, dtype in [(0, "float32"), (3, "float32"), (3, "bfloat16")]
    ]
    taught = [{**scenario, "reference": str(teacher)} for scenario in scenarios]
    theirs = learner.run(2, teacher, [{**scenario, "reference": True} for scenario in scenarios], tmp_path)
    for name, (tensors, _) in learner.run(2, model, taught, tmp_path).items():
        assert torch.equal(tensors["reference"], theirs[name][0]["before"]), name
        assert torch.equal(tensors["still"], tensors["reference"]), name
        assert not torch.allclose(tensors["before"], tensors["reference"], atol=1e-2), name


def test_score_is_the_stock_models_at_temperature_one(learner: Ranks, tmp_path: Path) -> None:
    model, ids = tiny_qwen2(tmp_path / "model"), torch.tensor([[3, 9, 4, 30, 12]])
    # A learning rate this small leaves the weights as they were loaded, to 1e-6.
    scenario = {"run": "surface", "name": "s", "stage": 0, "reference": True, "lr": 1e-9}
    _, report = learner.run(1, model, [scenario], tmp_path)["s"]
    table = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(input_ids=ids)
        .logits[0, :-1]
        .log_softmax(-1)
    )
    assert report["score"] == pytest.approx(table.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist(), abs=1e-5)


def test_two_steps_of_policy_and_critic_are_the_same_for_one_two_and_four_ranks_and_any_budget(
    learner: Ranks, model: Path, tmp_path: Path
) -> None:
    results: dict[str, tuple[dict[str, Tensor], Any]] = {}
    for ranks, cuts in {1: [(0, 1000), (0, 40)], 2: [(2, 60), (3, 40)], 4: [(3, 60)]}.items():
        scenarios = [
            {
                "run": "two_steps",
                "name": f"{ranks} ranks, stage {stage}, budget {budget}",
                "stage": stage,
                "budget": budget,
                "critic": True,
            }
            for stage, budget in cuts
        ]
        results |= learner.run(ranks, model, scenarios, tmp_path / str(ranks))
    (first, (expected, report)), *others = results.items()
    assert report["microbatches"] == 1 < results["1 ranks, stage 0, budget 40"][1]["microbatches"], first
    for name, (found, other) in others:
        assert found.keys() == expected.keys() and any(key.startswith("critic.head") for key in found)
        for key, tensor in expected.items():
            torch.testing.assert_close(
                found[key], tensor, atol=1e-6, rtol=0, msg=lambda m, n=name, k=key: f"{n}: {k}: {m}"
            )
        assert other["norms"] == pytest.approx(report["norms"], rel=1e-5), name


def test_the_critic_steps_alone_skips_what_is_not_finite_and_learns_a_constant_return(
    learner: Ranks, model: Path, tmp_path: Path
) -> None:
    scenarios = [
        {"run": "critic", "name": f"{stage} {dtype}", "stage": stage, "dtype": dtype, "critic": True}
        for stage, dtype in [(0, "float32"), (2, "float32"), (3, "float32"), (3, "bfloat16")]
    ]
    for name, (tensors, report) in learner.run(2, model, scenarios, tmp_path).items():
        expected = {"step": [0, ["policy"]], "bad": [1, []], "none": [1, []], "critic_step": [0, ["critic"]]}
        assert report["moved"] == expected, name
        assert report["losses"][-1] < report["losses"][0] / 100, name  # squares: the error falls by 10
        assert report["columns"] == [["values_T"], ["values_T"]] and not report["with_gradient"], name
        assert float((tensors["values_T"] - 0.7).abs().mean()) < 0.07, name


def test_the_reference_follows_the_policy_as_a_moving_average(
    learner: Ranks, model: Path, tmp_path: Path
) -> None:
    scenarios = [
        {"run": "reference", "name": f"{stage} {dtype}", "stage": stage, "dtype": dtype, "reference": True}
        for stage, dtype in [(0, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16"), (3, "bfloat16")]
    ]
    for name, (_, report) in learner.run(2, model, scenarios, tmp_path).items():
        # bfloat16 has 8 bits, and rounds at random to one of the two neighbours, in every one of the four
        # updates.
        assert report["error"] < (1e-6 if "float32" in name else 0.03), name
        assert report["span"] > 1e-3, name
        assert report["followed"] < report["far"][-1], name
        assert report["still"] and report["equal"] and report["apart"] == 0, name
