"""The vLLM plugin: vLLM loads it in each of its processes before the model, so it imports almost nothing."""

import os

from asyncrl.engine.base import OWNER_ENV
from asyncrl.hosting.processes import die_with_spawner


def register() -> None:
    """Let engine processes end when their generator ends, even by SIGKILL."""
    owner = os.environ.get(OWNER_ENV)
    if owner is not None and int(owner) != os.getpid():
        die_with_spawner()
