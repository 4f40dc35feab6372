"""Stand-ins around the shipped loops: an engine whose core is a process, an empty publisher, deadly ids."""

import asyncio
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.fake import FakeEngine, logits_of, logprobs_of
from asyncrl.lineage import INITIAL
from asyncrl.types import Rollout
from asyncrl.weights.base import UpdateOrder

PROBE = (1, 2, 3, 4)
DOOMED = 77
"""Exit status of a process that an id has killed."""

CORE = """
import os, sys
from asyncrl.hosting.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
while data := os.read(0, 1):
    os.write(1, data)
"""


class CoreEngine(FakeEngine):
    """Its core is a process of its own, as vLLM's is, and can be stopped under a living event loop.

    Nothing is sampled, and no question answered, without the core.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._asking = asyncio.Lock()

    async def begin(self) -> None:
        """Start the core."""
        pipe = asyncio.subprocess.PIPE
        self._core = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CORE, str(os.getpid()), stdin=pipe, stdout=pipe, env=dict(os.environ)
        )

    async def sample(
        self, prompt_ids: Sequence[int], count: int, spec: SamplingSpec, **options: Any
    ) -> list[Rollout]:
        """See `Engine.sample`."""
        await self.progress()
        return await super().sample(prompt_ids, count, spec, **options)

    async def progress(self) -> None:
        """See `Engine.progress`."""
        async with self._asking:
            assert self._core.stdin is not None and self._core.stdout is not None
            self._core.stdin.write(b"x")
            await self._core.stdout.readexactly(1)


def probe_logprobs(version: int) -> tuple[float, ...]:
    """What the learner scores at the version."""
    return tuple(map(float, logprobs_of(logits_of(version))[list(PROBE[1:])]))


def order_of(version: int, history: str = str(INITIAL)) -> UpdateOrder:
    """To adopt the weights that follow from the version."""
    return UpdateOrder(
        version=version,
        transport="disk",
        deadline_s=5.0,
        details={},
        probe_ids=(PROBE,),
        probe_logprobs=probe_logprobs(version),
        initial_logprobs=probe_logprobs(0),
        history=history,
    )


class OrdersOnly:
    """A publisher whose weights follow from the version."""

    one_host = True

    def __init__(self) -> None:
        self._newest: UpdateOrder | None = None

    def announce(self, version: int) -> None:
        self._newest = order_of(version)

    def publish(self, *_: Any, **options: Any) -> Any:
        raise NotImplementedError("weights follow from the version")

    def order(self, reader: str, transport: str) -> UpdateOrder | None:
        return self._newest

    def check(self) -> None: ...
    def release(self, reader: str) -> None: ...
    def close(self) -> None: ...


def mark(directory: Path, what: str, ticket_id: int) -> None:
    """From now on `ticket_id` kills who samples it (`ticket`) or trains on it (`step`)."""
    (directory / f"deadly-{what}s").mkdir(exist_ok=True)
    (directory / f"deadly-{what}s" / str(ticket_id)).touch()


def marked(directory: Path, what: str) -> set[int]:
    """The ids that kill."""
    folder = directory / f"deadly-{what}s"
    return {int(path.name) for path in folder.iterdir()} if folder.exists() else set()


def doom(directory: Path, what: str, ids: Iterable[int]) -> None:
    """End this process if one of `ids` kills: at once, as a crash of the engine or the device would."""
    if marked(directory, what).intersection(ids):
        os._exit(DOOMED)
