"""What surrounds the learner's data path: groups whose tokens can be told apart, and a trainer that knows a
number for each."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.batch.masks import PlanSettings
from asyncrl.batch.plan import Plan
from asyncrl.batch.resolve import make_recipe
from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.sections import BatchConfig
from asyncrl.trainer.base import StepResult, Usage
from asyncrl.types import Group, Rollout, VersionSpan

SETTINGS = PlanSettings(
    max_lag=2,
    mask_stale=True,
    mask_truncated=False,
    minibatches=1,
    tokens_per_microbatch=24,
    share=0,
    shares=1,
    device=torch.device("cpu"),
)
PHASE = {"logprobs_T": 0.0, "reference_logprobs_T": 1.0, "values_T": 2.0, "sum_squared_probs_T": 3.0}


def known(name: str, token: float) -> float:
    """What the fake trainer measures of a token."""
    value = float(np.sin(token + PHASE[name]))
    return (
        value
        if name == "values_T"
        else (value + 1.0) / 3.0
        if name == "sum_squared_probs_T"
        else -1.0 - value
    )


class Batch:
    """Rollouts of one batch with token ids that occur once."""

    def __init__(self) -> None:
        self._next = 1
        self.groups: list[Group] = []

    def group(self, *rollouts: Rollout, greedy: float | None = None) -> "Batch":
        self.groups.append(
            Group(
                ticket_id=len(self.groups) + 1,
                rollouts=rollouts,
                generator_id="g",
                finished_version=5,
                greedy_reward=greedy,
            )
        )
        return self

    def rollout(
        self, reward: float, versions: Sequence[int], *, tools: Sequence[int] = (), finish: str = "stop"
    ) -> Rollout:
        """One response token per version; `tools` are offsets of tokens that are no action."""
        ids = np.arange(self._next, self._next + len(versions), dtype=np.int32)
        self._next += len(versions)
        mask = np.ones(len(versions), dtype=bool)
        mask[list(tools)] = False
        return Rollout(
            prompt_ids=np.array([0, 0], dtype=np.int32),
            response_ids=ids,
            action_mask=mask,
            behaviour_logprobs=np.where(mask, np.float32(-1.0), np.float32(0.0)),
            version_spans=tuple(VersionSpan(version, 1) for version in versions),
            finish_reason=finish,
            reward=reward,
        )

    @property
    def actions(self) -> list[int]:
        """Ids of all action tokens, in order."""
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        return [int(token) for rollout in rollouts for token in rollout.response_ids[rollout.action_mask]]

    def column(self, name: str) -> torch.Tensor:
        """What the trainer must have measured, over all action tokens."""
        return torch.tensor([known(name, token) for token in self.actions], dtype=torch.float32)


def mixed_batch() -> Batch:
    """Stale, tool and truncated tokens, and a rollout without any action; trained at version 5."""
    batch = Batch()
    return (
        batch.group(batch.rollout(1.0, [5, 5, 5]), batch.rollout(0.0, [1, 4, 5, 5, 5]), greedy=0.25)
        .group(batch.rollout(2.0, [5] * 8, finish="length"), batch.rollout(0.0, [5]), greedy=1.0)
        .group(batch.rollout(0.5, [3, 3, 4, 4], tools=[0, 1]), batch.rollout(0.5, [2] * 6), greedy=0.0)
        .group(batch.rollout(3.0, [4] * 7, tools=[3]), batch.rollout(1.0, [5, 5], tools=[0, 1]), greedy=2.0)
    )


class Meeting:
    """Where the ranks of a fake learner, one thread each, exchange bytes."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks, timeout=120)
        self._parts = [b""] * ranks

    def gather(self, rank: int, value: bytes) -> list[bytes]:
        self._parts[rank] = value
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts


class FakeTrainer:
    """`Trainer` without a model: measures `known` numbers, and writes down what it is asked."""

    def __init__(self, meeting: Meeting | None = None, rank: int = 0) -> None:
        self._meeting = meeting or Meeting(1)
        self.rank = self.share = rank
        self.shares = self._meeting.ranks
        self.events: list[str] = []
        self.trained: list[int] = []
        self.measured_microbatches = 0
        self.sums: dict[str, float] = {"tokens": 1.0}

    def measure(self, microbatches, columns):
        self.events.append("measure")
        self.measured_microbatches = len(microbatches)
        return [
            {
                name: torch.tensor(
                    [known(name, token) for token in one.target_T.tolist()], dtype=torch.float32
                )
                for name in columns
            }
            for one in microbatches
        ]

    def usage(self):
        return [Usage()]

    def gather(self, value):
        self.events.append("gather")
        return self._meeting.gather(self.rank, value)

    def broadcast(self, value):
        return self._meeting.gather(self.rank, value or b"")[0]

    def step(self, microbatches, loss, *, entropy_gradient=True):
        self.events.append("step")
        self.trained = [token for one in microbatches for token in one.target_T.tolist()]
        return StepResult(metrics={**self.sums, "skipped_steps": 0.0}, grad_norm=1.0, lr=1e-6)

    def critic_step(self, microbatches, loss):
        self.events.append("critic")
        return StepResult(metrics={"tokens": 1.0, "loss": 0.5, "skipped_steps": 0.0}, grad_norm=2.0, lr=1e-5)

    def update_reference(self, decay):
        self.events.append(f"reference {decay}")


def planned(batch: Batch, version: int = 5, parts: tuple[str, ...] = (), **config) -> Plan:
    algorithm = make_recipe(
        AlgorithmConfig(**config),
        BatchConfig(groups=4, epochs=2),
        CriticConfig(),
        SETTINGS,
        max_response_tokens=8,
        reward_parts=parts,
    )
    planner = algorithm.planner
    trainer: Any = FakeTrainer()
    sequences = planner.assemble(batch.groups, version)
    return planner.plan(
        batch.groups, sequences, planner.measure(trainer, sequences), algorithm.coefficients.kl
    )
