"""A generator that the learner refuses ends for good: its supervisor must not start it again."""

import asyncio
import threading

import pytest
import zmq

from asyncrl.control.base import Hello, Refused
from asyncrl.control.client import ControlClient
from asyncrl.control.messages import CODEC
from asyncrl.errors import ControlError, ControlRefused

pytestmark = pytest.mark.integration

HELLO = Hello(generator_id="g0", incarnation="i", release="r", config_hash="c", version=0)


def join(endpoint: str, *, join_s: float) -> None:
    async def scenario() -> None:
        await ControlClient(endpoint, heartbeat_s=0.05, timeout_s=1.0, join_s=join_s).join(HELLO)

    asyncio.run(scenario())


def test_a_refusal_is_told_from_a_learner_that_does_not_answer(tmp_path):
    endpoint = f"ipc://{tmp_path}/control"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as learner:
        learner.setsockopt(zmq.LINGER, 0)
        learner.setsockopt(zmq.RCVTIMEO, 10_000)
        learner.bind(endpoint)

        def refuse() -> None:
            who, _ = learner.recv_multipart()
            learner.send_multipart([who, CODEC.encode(Refused(reason="another release"))])

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(ControlRefused, match="another release"):
            join(endpoint, join_s=10.0)
        thread.join(timeout=10)
    with pytest.raises(ControlError, match="no learner answered") as silent:
        join(f"ipc://{tmp_path}/nobody", join_s=0.2)
    assert not isinstance(silent.value, ControlRefused)
