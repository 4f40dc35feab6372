"""An engine whose core is a process of its own, as vLLM's is: it can be stopped under a living event loop."""

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.fake import FakeEngine
from asyncrl.types import Rollout

CORE = """
import os, sys
from asyncrl.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
while data := os.read(0, 1):
    os.write(1, data)
"""


class CoreEngine(FakeEngine):
    """Nothing is sampled, and no question answered, without the core."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._asking = asyncio.Lock()

    async def begin(self) -> None:
        """Start the core."""
        pipe = asyncio.subprocess.PIPE
        self._core = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CORE, str(os.getpid()), stdin=pipe, stdout=pipe, env=dict(os.environ)
        )

    async def sample(self, prompt_ids: Sequence[int], count: int, spec: SamplingSpec) -> list[Rollout]:
        """See `Engine.sample`."""
        await self.progress()
        return await super().sample(prompt_ids, count, spec)

    async def progress(self) -> None:
        """See `Engine.progress`."""
        async with self._asking:
            assert self._core.stdin is not None and self._core.stdout is not None
            self._core.stdin.write(b"x")
            await self._core.stdout.readexactly(1)
