"""The ranks of one learner beside rank 0: they get the frames as shipped, and train on what they decoded."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.launch.same_bytes import receive
from asyncrl.types import Group

from .content import decode
from .engine import Engine, Process
from .lane import require

Contents = list[tuple[Any, ...]]


class Ranks:
    """Threads of the learner's process: one that dies or hangs costs all."""

    def __init__(self, engine: Engine, process: Process, count: int) -> None:
        self._engine, self._count = engine, count
        self._values: list[bytes] = []
        """Every broadcast of rank 0."""
        self._heard = [0] * count
        self._waiting: list[Callable[[float, Any], None]] = []
        self._trained: dict[int, list[Contents]] = defaultdict(list)
        """By step, of the other ranks."""
        for rank in range(1, count):
            engine.start(process, lambda rank=rank: self._train_forever(rank))

    def say(self, value: bytes | None) -> bytes:
        """Rank 0's part of a broadcast."""
        assert value is not None
        self._values.append(value)
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer(self._engine.random.uniform(0.0, 0.01), None)
        return value

    def _hear(self, rank: int) -> bytes:
        while self._heard[rank] == len(self._values):
            answer, wait = self._engine.wait()
            self._waiting.append(answer)
            wait()
        self._heard[rank] += 1
        return self._values[self._heard[rank] - 1]

    def _train_forever(self, rank: int) -> None:
        step = 0
        while True:
            collected = receive(lambda _: self._hear(rank), decode)
            assert not isinstance(collected, bytes), "nobody has asked to stop"
            self._trained[step].append(contents(collected.groups))
            step += 1

    def meet(self, step: int, groups: Sequence[Group]) -> None:
        """Gradients are added up: rank 0 waits for the others, which must have trained on what it has."""
        while len(self._trained[step]) < self._count - 1:
            self._engine.sleep(0.05)
        for theirs in self._trained.pop(step):
            require(
                theirs == contents(groups), "a rank trains on other groups", step, theirs, contents(groups)
            )


def contents(groups: Sequence[Group]) -> Contents:
    """All that tells two frames apart."""
    return [
        (
            group.ticket_id,
            group.generator_id,
            [(rollout.reward, rollout.version_spans) for rollout in group.rollouts],
        )
        for group in groups
    ]
