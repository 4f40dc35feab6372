"""A GPU whose memory is full in a step: one message that says what to change, no restart, and a death counted."""

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch

from asyncrl.config.sections import LearnerConfig
from asyncrl.errors import MemoryFullError
from asyncrl.hosting.deaths import last_message
from asyncrl.hosting.processes import stop_processes
from asyncrl.hosting.progress import begin
from asyncrl.hosting.rank_group import wait_for_ranks
from asyncrl.hosting.supervisor import USER_ERROR
from asyncrl.launch import training
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.trainer.collectives import Rendezvous
from asyncrl.trainer.device import naming_memory
from tests.support.models import tiny_qwen2
from tests.support.ports import free_ports

pytestmark = pytest.mark.integration

SAID = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
# torch raises this error for GPUs only, so a loss raises it in the last rank, in the middle of DeepSpeed's step.
FULL = f"""
import os
import torch
from asyncrl.algo.losses import ppo_clip

def full(batch, logprobs_T):
    if int(os.environ["RANK"]) + 1 < int(os.environ["WORLD_SIZE"]):
        return ppo_clip(batch, logprobs_T)
    raise torch.OutOfMemoryError({SAID!r})
"""


STEP = """
import os
import sys
from dataclasses import replace
from pathlib import Path

from asyncrl.batch.hooks import Hooks
from asyncrl.batch.resolve import make_recipe
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.sections import BatchConfig, LearnerConfig, ModelConfig
from asyncrl.trainer.device import naming_memory
from asyncrl.launch.roles import run_role
from asyncrl.launch.step_deaths import StepDeaths
from asyncrl.learner import run_learner
from asyncrl.trainer.collectives import Rendezvous
from asyncrl.trainer.deepspeed.trainer import DeepSpeedTrainer
from tests.support.fake_learner import SETTINGS
from tests.support.learner_world import World

model, loss, record = sys.argv[1:]
rank, ranks, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.stdin.readline())


class Surroundings(World):
    def collect(self, version):
        if rank == 0:
            StepDeaths(Path(record)).begin(version, [b"group"])
        return super().collect(version)


def role():
    learner = LearnerConfig(device="cpu", steps=6, ranks=ranks, threads=1)
    trainer = DeepSpeedTrainer(
        ModelConfig(path=model, dtype="float32"), learner, temperature=1.0, optimizer_steps=1,
        device=SETTINGS.device, rendezvous=Rendezvous(rank=rank, ranks=ranks, local_rank=rank, port=port)
    )
    settings = replace(SETTINGS, share=rank, shares=ranks)
    algorithm = AlgorithmConfig(policy_loss=loss)
    recipe = make_recipe(
        algorithm, BatchConfig(groups=4), CriticConfig(), settings, max_response_tokens=8, reward_parts=()
    )
    with naming_memory(learner, rank):
        run_learner(trainer, Surroundings(), recipe, Hooks(), version=5, steps=6)


run_role(role)
"""


def test_a_step_without_memory_ends_the_run_with_what_to_change_and_counts_as_a_death(tmp_path: Path) -> None:
    """The exit status is that of a mistake of the user, which the supervisor neither restarts nor counts. If
    one rank of several is full, the others lose it in a collective, and say so in the same file."""
    (tmp_path / "full.py").write_text(FULL)
    record, output = tmp_path / "step.json", tmp_path / "learner.out"
    arguments = [str(tiny_qwen2(tmp_path / "model")), f"{tmp_path}/full.py:full", str(record)]
    for ranks, port in zip((1, 2), free_ports(2), strict=True):
        with output.open("wb") as file:
            processes = [
                subprocess.Popen(
                    [sys.executable, "-c", STEP, *arguments],
                    stdin=subprocess.PIPE,
                    stderr=file,
                    env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
                )
                for rank in range(ranks)
            ]
        try:
            for process in processes:
                with process.stdin as pipe:
                    pipe.write(b"%d\n" % port)
            assert wait_for_ranks(processes) == USER_ERROR, output.read_text()
        finally:
            stop_processes(processes, grace_s=10.0)
        # What the supervisor says of the run's end.
        said = last_message(output.read_text())
        assert said.startswith(f"MemoryFullError: rank {ranks - 1} of the learner was at 'train' ({SAID})")
        assert "lower learner.tokens_per_microbatch (16384)" in said
        StepDeaths(record)  # as the next start does
        assert list(json.loads(record.read_text())["steps"]["5"].values()) == [ranks], "one death more"
    assert StepDeaths(record).reason(b"group") is None


def test_a_run_whose_memory_is_full_ends_with_the_error_of_the_message(monkeypatch) -> None:
    """By it `LeadRun` knows that no restart follows, so that no generator waits for one."""
    for name in ("open_images", "recipe_of", "trainer_of", "require_right_code", "signal"):
        monkeypatch.setattr(training, name, mock.MagicMock())
    monkeypatch.setattr(training, "certified_probe", lambda *_: ((), ()))
    monkeypatch.setattr(training, "resume", lambda *_: (mock.Mock(), mock.Mock(version=0)))
    ended = []

    def open_lead_run(*_, **__):
        lead = ExitStack()
        lead.push(lambda kind, *_: ended.append(kind))
        return lead

    monkeypatch.setattr(training, "open_lead_run", open_lead_run)
    monkeypatch.setattr(training, "run_learner", mock.Mock(side_effect=torch.OutOfMemoryError(SAID)))
    config = mock.MagicMock(learner=LearnerConfig())
    with pytest.raises(MemoryFullError):
        training.train(config, *[mock.MagicMock()] * 4, Rendezvous(), *[mock.MagicMock()] * 3)
    assert ended == [MemoryFullError]


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


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "ncclUnhandledCudaError: Failed to CUDA calloc async 608 bytes",
    ],
)
def test_libraries_say_in_other_ways_that_a_gpu_is_full(said) -> None:
    with pytest.raises(MemoryFullError, match=re.escape(said)), naming_memory(LearnerConfig(), 0):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="shape"), naming_memory(LearnerConfig(), 0):
        raise RuntimeError("shape mismatch")
