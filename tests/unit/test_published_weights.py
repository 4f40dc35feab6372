"""What a trainer publishes for vLLM is what a checkpoint holds, tensor by tensor: vLLM reads no other names."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.sections import LearnerConfig, ModelConfig
from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer
from asyncrl.trainer.device import choose_device
from tests.support.models import EXPERTS, tiny_of


@pytest.mark.parametrize("kind", ["qwen2", *EXPERTS])
def test_what_is_published_is_what_a_checkpoint_holds(tmp_path: Path, kind: str) -> None:
    learner = LearnerConfig(device="cpu", threads=1)
    model = ModelConfig(path=str(tiny_of(tmp_path / "model", kind)), dtype="float32")
    device = choose_device(learner, local_rank=0, auto="cpu")
    made = DeepSpeedTrainer(model, learner, temperature=1.0, optimizer_steps=1, device=device, as_stored=True)
    with closing(made) as trainer:
        published = {name: tensor.clone() for name, tensor in trainer.tensors()}
        specs = trainer.specs()
        trainer.export()(tmp_path / "hf")
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert published.keys() == stored.keys() == {spec.name for spec in specs}
    assert all(torch.equal(published[name], stored[name]) for name in stored)
    assert {spec.name: spec.shape for spec in specs} == {name: one.shape for name, one in stored.items()}
    routers = [name for name in stored if name.endswith("e_score_correction_bias")]
    assert bool(routers) == (kind in ("glm4_moe", "deepseek_v3"))
    assert all(bool(stored[name].any()) for name in routers), "the test would not see another bias"
