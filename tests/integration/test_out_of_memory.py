"""A GPU whose memory is full in a step: one message that says what to change, no restart, and a death counted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.config.sections import LearnerConfig
from asyncrl.errors import MemoryFullError
from asyncrl.launch.learner_process import naming_memory
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.progress import begin
from asyncrl.supervisor import USER_ERROR
from asyncrl.telemetry.deaths import last_message
from tests.support.models import tiny_qwen2

pytestmark = pytest.mark.integration

SAID = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
# torch raises this error for GPUs only, so a loss raises it, in the middle of DeepSpeed's step.
FULL = f"import torch\n\ndef full(batch, logprobs_T):\n    raise torch.OutOfMemoryError({SAID!r})\n"


STEP = """
import sys
from pathlib import Path

from asyncrl.batch.hooks import Hooks
from asyncrl.batch.resolve import make_recipe
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.sections import BatchConfig, LearnerConfig, ModelConfig
from asyncrl.launch.learner_process import naming_memory
from asyncrl.launch.roles import run_role
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.learner import run_learner
from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer
from tests.support.fake_learner import SETTINGS
from tests.support.learner_world import World

model, loss, record = sys.argv[1:]


class Surroundings(World):
    def collect(self, version):
        StepDeaths(Path(record)).begin(version, [b"group"])
        return super().collect(version)


def role():
    learner = LearnerConfig(device="cpu", steps=6)
    trainer = DeepSpeedTrainer(
        ModelConfig(path=model, dtype="float32"), learner, temperature=1.0, optimizer_steps=1, device=SETTINGS.device
    )
    algorithm = AlgorithmConfig(policy_loss=loss)
    recipe = make_recipe(
        algorithm, BatchConfig(groups=4), CriticConfig(), SETTINGS, max_response_tokens=8, reward_parts=()
    )
    with naming_memory(learner, 0):
        run_learner(trainer, Surroundings(), recipe, Hooks(), version=5, steps=6)


run_role(role)
"""


def test_a_step_without_memory_ends_the_run_with_what_to_change_and_counts_as_a_death(tmp_path: Path) -> None:
    """The exit status is that of a mistake of the user, which the supervisor neither restarts nor counts."""
    (tmp_path / "full.py").write_text(FULL)
    record = tmp_path / "step.json"
    arguments = [str(tiny_qwen2(tmp_path / "model")), f"{tmp_path}/full.py:full", str(record)]
    for deaths in (1, 2):
        done = subprocess.run(
            [sys.executable, "-c", STEP, *arguments], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == USER_ERROR, done.stderr
        # What the supervisor says of the run's end.
        said = last_message(done.stderr)
        assert said.startswith(f"MemoryFullError: rank 0 of the learner was at 'train' ({SAID})"), said
        assert "lower learner.tokens_per_microbatch (16384)" in done.stderr
        StepDeaths(record)  # as the next start does
        assert list(json.loads(record.read_text())["steps"]["5"].values()) == [deaths]
    assert StepDeaths(record).reason(b"group") is None


@pytest.mark.parametrize(
    ("learner", "named", "not_named"),
    [
        ({}, ["tokens_per_microbatch (16384)", "gradient_checkpointing: true", "offload_optimizer"], []),
        (
            {"gradient_checkpointing": True, "offload_optimizer": True, "zero_stage": 3},
            ["logprob_chunk_tokens (1024)"],
            ["gradient_checkpointing", "offload_optimizer"],
        ),
    ],
)
def test_the_message_names_the_keys_that_can_still_lower_it(learner, named, not_named) -> None:
    begin("train")
    with pytest.raises(MemoryFullError) as caught, naming_memory(LearnerConfig(**learner), 3):
        raise torch.OutOfMemoryError(f"{SAID}\nIf reserved but unallocated memory is large try ...")
    message = str(caught.value)
    assert message.startswith(f"rank 3 of the learner was at 'train' ({SAID})")
    assert all(key in message for key in named)
    assert not any(key in message for key in not_named)
