"""CURVE on the control plane: between hosts every message is encrypted, and only those who know the run's keys may talk.

Keys are 32 bytes; a pair is named by its secret half, the public half follows from it.
"""

from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

_DOMAIN = "asyncrl"


@dataclass(frozen=True, slots=True, repr=False)
class LearnerKeys:
    """What the listening side holds."""

    secret: bytes
    # The public key that all generators of the run have; nobody with another one is let in.
    generators: bytes


@dataclass(frozen=True, slots=True, repr=False)
class GeneratorKeys:
    """What the calling side holds."""

    secret: bytes
    # The learner's public key: nobody else can answer.
    learner: bytes


def public_key(secret: bytes) -> bytes:
    """The other half of a pair."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def guard(socket: "zmq.Socket[bytes]", keys: LearnerKeys) -> ThreadAuthenticator:
    """Let only the run's generators in. Call it before binding, stop what it returns before the context ends."""
    gate = ThreadAuthenticator(socket.context)
    gate.configure_curve_callback(_DOMAIN, _AllowList(keys.generators))
    gate.start()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it a connection is admitted when nobody answers for the domain
    return gate


def introduce(socket: "zmq.Socket[bytes]", keys: GeneratorKeys) -> None:
    """Call as a generator of the run. Call it before connecting."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.learner)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key(keys.secret))
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


class _AllowList:
    """Asked by the authenticator about every key that calls."""

    def __init__(self, allowed: bytes) -> None:
        self._allowed = z85.encode(allowed)

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._allowed
