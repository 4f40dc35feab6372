"""What a server says to a client of ZeroMQ's CURVE."""

import zmq

from asyncrl.control.base import Hello
from asyncrl.control.messages import CODEC, MAX_ORDER_BYTES
from asyncrl.control.sockets import present_keys, set_options

HELLO = Hello(generator_id="a", incarnation="1", release="another", config_hash="abc", version=0)
"""Of another release: an answer is a refusal, so it does not join."""


def answer(endpoint, keys, *, secret=None, wait_ms=1500, wire_key=b""):
    """What a socket with these keys hears from the learner; None: nothing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as caller:
        set_options(caller, max_bytes=MAX_ORDER_BYTES)
        caller.setsockopt_string(zmq.IDENTITY, "a:1")
        if keys is not None:
            present_keys(caller, keys)
        if secret is not None:
            caller.setsockopt(zmq.CURVE_SECRETKEY, secret)
        caller.connect(endpoint)
        caller.send(CODEC.encode(HELLO, wire_key))
        return CODEC.decode(caller.recv(), wire_key) if caller.poll(wait_ms) else None
