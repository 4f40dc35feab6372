"""The vLLM plugin: vLLM loads it in each of its processes before the model, so it imports almost nothing."""

import os
import signal

from asyncrl.engine.base import OWNER_ENV
from asyncrl.hosting.processes import die_with_parent, die_with_spawner


def register() -> None:
    """Let engine processes end when their generator ends, even by SIGKILL."""
    owner = int(os.environ.get(OWNER_ENV, "0"))

    def begin_as_fork() -> None:
        die_with_parent(owner)
        signal.set_wakeup_fd(-1)  # signals are not those of the generator's event loop

    if owner == os.getpid():
        os.register_at_fork(after_in_child=begin_as_fork)  # vLLM loads no plugin again there
    elif owner:
        die_with_spawner()
