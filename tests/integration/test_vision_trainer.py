"""The trainer on a model with a vision part, on one and two real ranks, against a plain torch loop."""

import json
import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.support.ranks import Ranks, forked_ranks
from tests.support.trainer_worker import sequences, tokens_of
from tests.support.vlm_models import tiny_idefics3, with_pictures

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_idefics3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learner() -> Iterator[Ranks]:
    with forked_ranks() as learner:
        yield learner


def seen_by(processor: Any, images: Sequence[bytes]) -> dict[str, Tensor]:
    pictures = [Image.open(BytesIO(image)) for image in images]
    found = processor(text=["<image>" * len(images)], images=[pictures], return_tensors="pt")
    return {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}


def oracle(model: Path, *, images: bool = False) -> dict[str, Tensor]:
    """Gradient of a stock model: one sequence at a time, full logits, no packing, no DeepSpeed, nothing frozen."""
    policy = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(model)
    items = with_pictures(sequences(), str(model)) if images else sequences()
    total = torch.zeros(())
    for one in items:
        ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids]).astype(np.int64))
        seen = seen_by(processor, one.images) if one.images else {}
        table = (policy(input_ids=ids[None], **seen).logits[0] / 0.7).log_softmax(-1)
        table = table[len(one.prompt_ids) - 1 : -1]
        chosen = table.gather(-1, torch.from_numpy(one.response_ids.astype(np.int64))[:, None]).squeeze(-1)
        entropy = -(table.exp() * table).sum(-1)
        keep = torch.from_numpy(one.keep)
        total = total - (chosen * torch.from_numpy(one.advantages))[keep].sum() - 0.1 * entropy[keep].sum()
    (total / tokens_of(items)).backward()
    is_language = re.compile(r"lm_head|model\.text_model").match
    return {name: each.grad for name, each in policy.named_parameters() if is_language(name)}


CUTS = {1: [[[3], [0, 6, 1], [], [2, 4, 5]]], 2: [[[0, 1, 2, 3, 4], [5], []], [[6], [], []]]}


@pytest.mark.parametrize(("ranks", "images"), [(1, False), (1, True), (2, True)])
def test_only_the_language_model_is_trained_and_published(
    learner: Ranks, model: Path, tmp_path: Path, ranks: int, images: bool
) -> None:
    """With images, one rank has an empty micro-batch, and one has a micro-batch whose prompts have text only."""
    expected = oracle(model, images=images)
    scenarios: list[dict[str, Any]] = [
        {"run": "gradient", "name": f"stage {stage}", "stage": stage, "cut": CUTS[ranks]}
        for stage in (0, 1, 3)
    ]
    if images:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"question": "what?", "images": []}) + "\n")
        scenarios = [one | {"images": str(rows)} for one in scenarios]
        scenarios.append(scenarios[-1] | {"name": "checkpointing", "checkpointing": True})
    for name, (gradients, report) in learner.run(ranks, model, scenarios, tmp_path).items():
        assert report["names"] == list(expected), name
        assert not any("vision" in one or "connector" in one for one in report["names"])
        for parameter, gradient in expected.items():
            torch.testing.assert_close(
                gradients[parameter].float(),
                gradient,
                atol=1e-5,
                rtol=1e-4,
                msg=lambda m, n=name, p=parameter: f"{n}: {p}: {m}",
            )


def test_an_export_is_the_whole_model_with_its_processor(learner: Ranks, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    scenario = {"run": "gradient", "name": "export", "stage": 3, "cut": CUTS[2], "export": str(out)}
    learner.run(2, model, [scenario], tmp_path)
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("vision" in name or "connector" in name for name in moved)
    assert AutoProcessor.from_pretrained(out).image_token == "<image>"
