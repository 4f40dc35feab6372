"""The vLLM plugin: vLLM loads it in each of its processes before the model, so it imports almost nothing."""

import os
import signal
from functools import partial

from asyncrl.engine.base import OWNER_ENV
from asyncrl.hosting.processes import die_with_parent, die_with_spawner


def register() -> None:
    """Let engine processes end when their generator ends, even by SIGKILL."""
    owner = int(os.environ.get(OWNER_ENV, "0"))
    if owner == os.getpid():
        os.register_at_fork(after_in_child=partial(_begin_as_fork, owner))
    elif owner:
        die_with_spawner()


def _begin_as_fork(owner: int) -> None:
    """Vllm loads no plugin again there. Signals are not those of the generator's event loop."""
    die_with_parent(owner)
    signal.set_wakeup_fd(-1)
