"""CURVE on the control plane: encryption between hosts; only holders of the run's keys can connect.

Keys are 32 bytes; the public half of a pair is computed from its secret half.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

_DOMAIN = "asyncrl"


@dataclass(frozen=True, slots=True, repr=False)
class LearnerKeys:
    """The keys of the listening side."""

    secret: bytes
    # The public key that all generators of the run share; a connection with another key is refused.
    generators: bytes


@dataclass(frozen=True, slots=True, repr=False)
class GeneratorKeys:
    """The keys of the connecting side."""

    secret: bytes
    # The learner's public key: only its owner can answer.
    learner: bytes


def public_key(secret: bytes) -> bytes:
    """The public half of the pair with this secret half."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def require_keys(socket: "zmq.Socket[bytes]", keys: LearnerKeys) -> ThreadAuthenticator:
    """Accept only the run's generators. Call before binding; stop the authenticator before the context."""
    authenticator = ThreadAuthenticator(socket.context)
    # It decides on the key of every new connection.
    allowed = z85.encode(keys.generators)
    accept = SimpleNamespace(callback=lambda domain, key: key == allowed)
    authenticator.configure_curve_callback(_DOMAIN, accept)
    authenticator.start()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    # Otherwise connections are accepted while no authenticator answers for the domain.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return authenticator


def present_keys(socket: "zmq.Socket[bytes]", keys: GeneratorKeys) -> None:
    """Connect as a generator of the run. Call it before connecting."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.learner)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key(keys.secret))
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
