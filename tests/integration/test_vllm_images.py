"""vLLM with images: what it samples is what transformers computes, before and after updates without the tower."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from asyncrl.data.image_processor import ImageProcessor
from asyncrl.engine.base import SamplingSpec
from asyncrl.errors import ResultError
from asyncrl.types import Rollout
from tests.support.vllm_engines import apply, running_engine, scrambled, slot_order
from tests.support.vlm_models import picture_bytes, tiny_idefics3

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

TEXT = "user:<image>which?<end_of_utterance>assistant:"
TWO = "user:<image>and <image>which?<end_of_utterance>assistant:"
SPEC = SamplingSpec(temperature=1.0, max_response_tokens=12)


def is_frozen(name: str) -> bool:
    return "vision" in name or "connector" in name


def expected(model: Any, processor: ImageProcessor, rollout: Rollout, images: list[bytes]) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64))[None]
    with torch.no_grad():
        # Each response in one pass: a placeholder that was sampled would be taken for an image.
        logits = model(input_ids=ids, **processor.inputs(images)).logits[0]
    picked = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
    return picked[len(rollout.prompt_ids) - 1 :].numpy()


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_log_probabilities_are_transformers_before_and_after_updates(
    tmp_path: Path, recompute_kv: bool
) -> None:
    """The images are the same before and after each update: vLLM's core must not have forgotten them."""
    path = tiny_idefics3(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    with running_engine(path, recompute_kv=recompute_kv) as (runner, engine):
        processor = ImageProcessor(engine_model(path))
        prompts = {
            text: (images, processor.ids(text, images, "here"), processor.read(text, images, "here"))
            for text, images in (
                (TEXT, [picture_bytes(1)]),
                (TWO, [picture_bytes(1), picture_bytes(2, (56, 28))]),
            )
        }
        answers = {}
        for version in range(3):
            for text, (images, ids, read) in prompts.items():
                rollouts = runner.run(engine.sample(ids, 4, SPEC, images=read))
                for rollout in rollouts:
                    assert rollout.prompt_ids.tolist() == list(ids)
                    if processor.image_token_id in rollout.response_ids:
                        continue
                    np.testing.assert_allclose(
                        rollout.behaviour_logprobs, expected(model, processor, rollout, images), atol=1e-4
                    )
                answers[version, text] = rollouts
            # An update brings the language model only.
            before = model
            model = scrambled(copy.deepcopy(before), version + 1)
            with torch.no_grad():
                for (name, new), (_, old) in zip(
                    model.named_parameters(), before.named_parameters(), strict=True
                ):
                    if is_frozen(name):
                        new.copy_(old)
            left_out = [name for name, _ in model.named_parameters() if is_frozen(name)]
            slot, order = slot_order(version + 1, model, left_out)
            runner.run(apply(engine, order))
            slot.close()
        images, ids, read = prompts[TEXT]
        other = processor.read(TEXT, [picture_bytes(5)], "here")
        ids_of = tuple(ids)
        one = runner.run(engine.sample(ids_of, 1, SPEC, images=read))[0]
        apart = expected(model, processor, one, images) - expected(model, processor, one, [picture_bytes(5)])
        assert np.abs(apart).max() > 0.1
        (seen,) = runner.run(engine.sample(ids_of, 1, SPEC, images=other))
        np.testing.assert_allclose(
            seen.behaviour_logprobs, expected(model, processor, seen, [picture_bytes(5)]), atol=1e-4
        )
        with pytest.raises(ResultError, match="tokens of a prompt with images"):
            runner.run(engine.sample((*ids_of, 9), 1, SPEC, images=read))


def engine_model(path: Path) -> Any:
    from asyncrl.config.sections import ModelConfig

    return ModelConfig(path=str(path))
