"""An adapter in the trainer, on one and more real ranks, against torch and PEFT alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from asyncrl import lora
from tests.support.models import model_of, peft_adapter, tiny_qwen2
from tests.support.ranks import Ranks, forked_ranks
from tests.support.trainer_worker import plain_loss

pytestmark = pytest.mark.integration

IDS = [3, 9, 4, 30, 12, 2, 7, 7, 21]
CUTS = {1: [[[3], [0, 6, 1], [], [2, 4, 5]]], 2: [[[0, 1, 2, 3, 4], [5], []], [[6], [], []]]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def start(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A config of an adapter that PEFT has saved, whose matrices are both random."""
    directory = tmp_path_factory.mktemp("adapter")
    peft_adapter(base, directory)
    return {"rank": 8, "alpha": 16, "targets": ["q_proj", "up_proj"], "start": str(directory)}


@pytest.fixture(scope="module")
def learner() -> Iterator[Ranks]:
    with forked_ranks() as learner:
        yield learner


def on_disk(name: str) -> str:
    return name.replace(".default", "")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_gradient_of_the_adapter_is_that_of_peft(
    learner: Ranks, base: Path, start: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    model = PeftModel.from_pretrained(model_of(base), start["start"], is_trainable=True)
    loss = plain_loss(model)
    loss.backward()
    expected = {on_disk(name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    cut = CUTS.get(ranks, CUTS[2] * 2)
    if ranks == 4:  # two pairs that divide sequences
        cut = [part for part in CUTS[2] for _ in range(2)]
    plain = {"run": "gradient", "cut": cut, "lora": start, "sequence_parallel": 1 if ranks < 4 else 2}
    scenarios = [plain | {"name": f"stage {stage}", "stage": stage} for stage in range(4)]
    scenarios += [
        plain | {"name": f"{stage} {setting}", "stage": stage, "checkpointing": setting}
        for stage, setting in ((3, True), (2, "selective"))
    ]
    for name, (gradients, report) in learner.run(ranks, base, scenarios, tmp_path).items():
        assert report["names"] == list(expected), name
        for parameter, gradient in expected.items():
            torch.testing.assert_close(
                gradients[parameter].float(),
                gradient,
                atol=1e-6,
                rtol=1e-5,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        norm = float(torch.cat([gradient.flatten() for gradient in expected.values()]).norm())
        assert report["grad_norm"] == pytest.approx(norm, rel=1e-5), name
        assert report["metrics"]["loss"] == pytest.approx(float(loss.detach()), abs=1e-6), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_policy_with_its_adapter_as_it_began_is_the_reference_bit_for_bit(
    learner: Ranks, base: Path, start: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    kinds = [(0, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16"), (3, "bfloat16")]
    plain = {"run": "surface", "reference": True}
    scenarios: list[dict[str, Any]] = [
        plain | {"name": f"{stage} {dtype} {kind}", "stage": stage, "dtype": dtype, "lora": chosen}
        for stage, dtype in kinds
        for kind, chosen in {"zero": {"rank": 8}, "start": start, "whole": None}.items()
    ]
    results = learner.run(ranks, base, scenarios, tmp_path)
    for name, (tensors, report) in results.items():
        whole, _ = results[f"{name.rpartition(' ')[0]} whole"]
        assert torch.equal(tensors["reference"], tensors["before"]), name
        assert torch.equal(tensors["still"], tensors["before"]), name
        assert torch.equal(tensors["before"], whole["before"]) == (not name.endswith("start")), name
        assert not torch.allclose(tensors["after"], tensors["before"], atol=1e-3), name
        rounding = 1e-5 if "float32" in name else 0.03
        assert report["plain"] == pytest.approx(report["score"], abs=rounding) and report["as_before"], name
        assert report["specs"] and not report["with_gradient"], name


KINDS = [(0, "float32", 1), (2, "bfloat16", 2), (3, "float32", 2), (3, "bfloat16", 1)]


@pytest.mark.parametrize(("stage", "dtype", "ranks"), KINDS)
def test_a_resumed_adapter_goes_on_and_the_base_stays_bit_for_bit(
    learner: Ranks, base: Path, tmp_path: Path, stage: int, dtype: str, ranks: int
) -> None:
    store = tmp_path / "store"
    plain = {"run": "train", "stage": stage, "dtype": dtype, "lora": {"rank": 1}}
    saved = plain | {"store": str(store)}
    first = learner.run(
        ranks,
        base,
        [plain | {"name": "whole", "steps": [0, 5]}, saved | {"name": "begun", "steps": [0, 2]}],
        tmp_path / "first",
    )
    second = learner.run(ranks, base, [saved | {"name": "resumed", "steps": [2, 5]}], tmp_path / "second")
    (whole, _), (begun, _), (resumed, _) = first["whole"], first["begun"], second["resumed"]
    given = {name: tensor.to(getattr(torch, dtype)) for name, tensor in model_of(base).named_parameters()}
    found = {name.removeprefix("policy.model."): tensor for name, tensor in whole.items()}
    trained = [name for name in found if ".lora_" in name]
    for name, tensor in given.items():
        layer, _, kind = name.rpartition(".")
        wrapped = f"{layer}.base_layer.{kind}"
        assert torch.equal(found[wrapped if wrapped in found else name], tensor), name
    assert len(trained) == 2 * 7 * 2 and len(found) >= len(given) + len(trained)
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
        assert (".lora_" in name) != torch.equal(begun[name], tensor), name
    for file in (store / "step-000002" / "engine").rglob("*model_states.pt"):
        kept = torch.load(file, weights_only=False)["module"]
        assert all(".lora_" in name for name in kept), f"the base is in a checkpoint: {file.name}"


def test_the_export_is_an_adapter_of_peft_and_merged_tensors_are_its_merge(
    learner: Ranks, base: Path, start: dict[str, Any], tmp_path: Path
) -> None:
    plain: dict[str, Any] = {"run": "checkpoint", "ids": IDS}
    scenarios = [
        plain | {"name": f"{stage} {sync}", "stage": stage, "lora": chosen | {"sync": sync}}
        for stage, sync, chosen in ((0, "adapter", start), (3, "merged", start), (2, "merged", {"rank": 8}))
    ]
    for scenario in scenarios:
        scenario["store"] = str(tmp_path / scenario["name"])
    ids = torch.tensor([IDS])
    for name, (published, scores) in learner.run(2, base, scenarios, tmp_path).items():
        exported = tmp_path / name / "step-000001" / "hf"
        assert not (exported / "model.safetensors").exists() and (exported / "tokenizer.json").exists()
        model = PeftModel.from_pretrained(model_of(base), exported).eval()
        with torch.no_grad():
            table = model(ids).logits[0, :-1].log_softmax(-1)
        score = table.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        assert scores[1] == pytest.approx(score, abs=1e-5), name
        assert scores[0] != pytest.approx(score, abs=1e-3), name
        expected = load_file(exported / lora.TENSORS)
        if name.endswith("merged"):
            expected = dict(model.merge_and_unload().named_parameters())
        assert published.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(published[key], tensor.data, rtol=0, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.parametrize(("ranks", "kinds"), [(1, [(0, "float32"), (1, "bfloat16")]), (2, [(2, "bfloat16")])])
def test_a_rank_takes_what_is_planned(
    learner: Ranks, tmp_path: Path, ranks: int, kinds: list[tuple[int, str]]
) -> None:
    """With a reference, for which nothing is planned and nothing is kept."""
    model = tiny_qwen2(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    plain = {"run": "memory", "reference": True, "lora": {"rank": 16}}
    scenarios = [
        plain | {"name": f"{stage} {dtype}", "stage": stage, "dtype": dtype} for stage, dtype in kinds
    ]
    numbers = sum(map(Tensor.numel, model_of(model).parameters()))
    for name, (_, report) in learner.run(ranks, model, scenarios, tmp_path).items():
        assert "reference" not in report["plan"] and "critic" not in report["plan"]
        # Weights that are frozen stay in the mapped file, which does not count there.
        base = numbers * (4 if "float32" in name else 2)
        assert report["peak"] + base == pytest.approx(sum(report["plan"].values()), rel=0.05), name
        assert report["peak"] < sum(report["plan"].values()) / 1.5, name
