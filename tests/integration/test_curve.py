"""Over a network only generators that have the run's secret are heard by the learner, and only the learner is
heard by them."""

import asyncio
import os
import socket

import psutil
import pytest
import zmq
from zmq.utils import z85

from asyncrl.config.sections import ControlConfig
from asyncrl.control.base import Refused
from asyncrl.control.client import ControlClient
from asyncrl.control.membership import RunIdentity
from asyncrl.control.messages import CODEC, MAX_ORDER_BYTES
from asyncrl.control.sockets import (
    MAX_REPORT_BYTES,
    GeneratorKeys,
    LearnerKeys,
    present_keys,
    public_key,
    set_options,
)
from asyncrl.control.zmq import ControlHub
from asyncrl.errors import ControlError
from asyncrl.run.keys import RunKeys
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout
from asyncrl.weights.publisher import SlotPublisher
from tests.support.curve import HELLO, answer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

LAYOUT = Layout.plan([TensorSpec(name="w", dtype="float32", shape=(2,))], 1000)
RUN = RunIdentity(release="1.0", config_hash="abc")
KEYS, OTHERS = RunKeys(bytes(range(32))), RunKeys(bytes(32))


def make_hub(publisher, **changes):
    values = {
        "transport": "tcp",
        "deadline_s": 5.0,
        "keys": KEYS.control,
    } | changes
    endpoint = values.pop("endpoint", "tcp://127.0.0.1:*")
    return ControlHub(endpoint, publisher, ControlConfig(heartbeat_s=0.2, timeout_s=3.0), RUN, **values)


@pytest.fixture
def publisher(tmp_path):
    made = SlotPublisher(
        LAYOUT,
        probe_ids=((1, 2),),
        initial_logprobs=(0.0,),
        directory=tmp_path,
        deadline_s=5.0,
        interface="127.0.0.1",
    )
    yield made
    made.close()


@pytest.fixture
def hub(publisher):
    made = make_hub(publisher)
    yield made
    made.stop("test is over")


def test_the_runs_generators_are_heard(hub):
    assert isinstance(answer(hub.endpoint, KEYS.join.control, wait_ms=10_000), Refused)


@pytest.mark.parametrize(
    ("why", "keys"),
    [
        ("no keys at all", None),
        ("knows the learner's key only", GeneratorKeys(secret=os.urandom(32), learner=KEYS.join.learner)),
        (
            "another run's generator",
            GeneratorKeys(secret=OTHERS.join.control.secret, learner=KEYS.join.learner),
        ),
        (
            "takes somebody else for the learner",
            GeneratorKeys(secret=KEYS.join.control.secret, learner=OTHERS.join.learner),
        ),
        ("an empty secret", GeneratorKeys(secret=bytes(32), learner=KEYS.join.learner)),
    ],
)
def test_nobody_else_is_heard(hub, why, keys):
    assert answer(hub.endpoint, keys) is None, why
    assert hub.counters()["messages_rejected"] == 0, "it came as far as a message"
    assert isinstance(answer(hub.endpoint, KEYS.join.control, wait_ms=10_000), Refused), (
        "the right one is heard still"
    )


def test_knowing_the_allowed_public_key_is_not_enough(hub):
    allowed = KEYS.control.generators
    with zmq.Context() as context, context.socket(zmq.DEALER) as caller:
        set_options(caller, max_bytes=MAX_ORDER_BYTES)
        caller.setsockopt(zmq.CURVE_SERVERKEY, KEYS.join.learner)
        caller.setsockopt(zmq.CURVE_PUBLICKEY, allowed)
        caller.setsockopt(zmq.CURVE_SECRETKEY, os.urandom(32))
        caller.connect(hub.endpoint)
        caller.send(CODEC.encode(HELLO))
        assert not caller.poll(1500)
    assert hub.counters()["messages_rejected"] == 0


def test_a_generator_does_not_listen_to_somebody_who_pretends_to_be_the_learner():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as liar:
        liar.linger = 0
        liar.setsockopt(zmq.CURVE_SERVER, 1)
        liar.setsockopt(zmq.CURVE_SECRETKEY, OTHERS.control.secret)
        liar.bind("tcp://127.0.0.1:*")
        endpoint = liar.getsockopt_string(zmq.LAST_ENDPOINT)

        async def scenario():
            client = ControlClient(
                endpoint, heartbeat_s=0.2, timeout_s=1.0, join_s=1.5, keys=KEYS.join.control
            )
            await client.join(HELLO)

        with pytest.raises(ControlError, match=r"no learner answered.*has the secret of this run"):
            asyncio.run(scenario())
        assert not liar.poll(100)


def test_a_generator_without_keys_does_not_call_over_a_network():
    client = ControlClient("tcp://127.0.0.1:1", heartbeat_s=0.2, timeout_s=1.0)
    with pytest.raises(ControlError, match=r"join\.key"):
        asyncio.run(client.join(HELLO))


def test_a_learner_without_keys_does_not_listen_to_a_network(publisher):
    with pytest.raises(ControlError, match="needs the run's keys"):
        make_hub(publisher, keys=None)


def test_a_port_that_is_taken_leaves_no_thread_behind(publisher, hub):
    before = psutil.Process().num_threads()
    for _ in range(3):
        with pytest.raises(ControlError, match="cannot listen"):
            make_hub(publisher, endpoint=hub.endpoint)
    wait_until(lambda: psutil.Process().num_threads() <= before)


def test_what_is_too_large_costs_the_connection_and_not_the_learner(hub):
    with zmq.Context() as context, context.socket(zmq.DEALER) as caller:
        caller.linger = 0
        present_keys(caller, KEYS.join.control)
        caller.setsockopt_string(zmq.IDENTITY, "a:1")
        caller.connect(hub.endpoint)
        caller.send(bytes(64 * MAX_REPORT_BYTES))
        assert not caller.poll(1000)
        for _ in range(20):  # one that is sent while the connection ends may end with it
            caller.send(CODEC.encode(HELLO))
            if caller.poll(1000):
                break
        else:
            pytest.fail("small messages arrive after it connected again")
    assert hub.counters()["messages_rejected"] == 0, "it was dropped before the learner saw it"


def test_whoever_speaks_no_zmq_is_dropped_and_the_others_are_heard(hub):
    address = hub.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=5.0) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        assert isinstance(answer(hub.endpoint, KEYS.join.control, wait_ms=10_000), Refused)


def test_keys_are_derived_and_a_generators_do_not_give_the_learners_away():
    join = KEYS.join
    assert public_key(KEYS.control.secret) == join.learner
    assert public_key(join.control.secret) == KEYS.control.generators
    secrets = [KEYS.secret, join.secret, join.wire, KEYS.control.secret, join.control.secret]
    secrets += [bytes.fromhex(KEYS.store_password(user)) for user in ("learner", "generator")]
    assert len(set(secrets)) == len(secrets)
    assert join.store_password("generator") == KEYS.store_password("generator")
    assert join.store_password("learner") is None
    assert not any(
        secret.hex() in repr(KEYS) + repr(join) + repr(KEYS.control) + repr(join.control)
        for secret in secrets
    )
    assert isinstance(KEYS.control, LearnerKeys) and z85.encode(join.learner)
