"""The sockets of the control plane: a private socket file, or one address behind CURVE.

CURVE encrypts between hosts, and only holders of the run's keys can connect. Keys are 32 bytes; the public
half of a pair is computed from its secret half.
"""

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from asyncrl.config.addresses import is_everywhere
from asyncrl.errors import ControlError

# Largest message that the learner accepts; generators send a few KiB.
MAX_REPORT_BYTES = 1 << 15
_QUEUED_MESSAGES = 64
_HANDSHAKE_MS = 5_000
_DOMAIN = "asyncrl"
# Enough for the learner and for strangers' connections, which take one each until the handshake times out.
_WANTED_DESCRIPTORS = 1 << 16


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


def listen(
    endpoint: str,
    keys: LearnerKeys | None,
    *,
    max_bytes: int = MAX_REPORT_BYTES,
    kind: "type[zmq.Context[Any]]" = zmq.Context,
) -> "tuple[zmq.Socket[bytes], Callable[[int], None]]":
    """A bound ROUTER in a context of its own, and what ends both, after `linger_ms`. Raises ControlError."""
    _require_private(endpoint, keys)
    context = kind()
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    authenticator = None

    def end(linger_ms: int) -> None:
        router.close(linger=linger_ms)
        if authenticator is not None:
            authenticator.stop()
        context.term()

    set_options(router, max_bytes=max_bytes)
    router.setsockopt(zmq.IPV6, "[" in endpoint)
    if endpoint.startswith("tcp://") and keys is not None:
        authenticator = _require_keys(router, keys)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_WANTED_DESCRIPTORS, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A generator that reconnects keeps its identity, which no other process knows.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        end(0)
        raise ControlError(
            f"control plane: cannot listen on {endpoint}: {error}; set control.bind to a free address"
        ) from error
    if endpoint.startswith("ipc://"):
        os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    return router, end


def connect(socket: Any, endpoint: str, keys: GeneratorKeys | None, *, max_bytes: int) -> None:
    """Connect a DEALER, of either kind, that queues nothing without a listener. Raises ControlError."""
    set_options(socket, max_bytes=max_bytes)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    if endpoint.startswith("tcp://"):
        if keys is None:
            raise ControlError(
                f"control plane: {endpoint} is a network address, but this generator has no keys "
                "of the run; give it the join.key of the learner's run directory (docs/security.md)"
            )
        present_keys(socket, keys)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # A secret identity, so that no other process can send messages in the name of this one.
    socket.setsockopt(zmq.IDENTITY, os.urandom(16).hex().encode())
    socket.connect(endpoint)


def set_options(socket: "zmq.Socket[bytes]", *, max_bytes: int) -> None:
    """Options of both ends: no queue for a dead peer, no message above `max_bytes`, no blocking close."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)  # closes a connection that never sends anything
    # Drops the connection of a stopped peer, so that sending to it fails instead of queueing.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)


def present_keys(socket: "zmq.Socket[bytes]", keys: GeneratorKeys) -> None:
    """Connect as a generator of the run. Call it before connecting."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.learner)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key(keys.secret))
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def _require_private(endpoint: str, keys: LearnerKeys | None) -> None:
    """Raise ControlError for an address that any process could reach, or that the system does not allow."""
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or (scheme == "tcp" and is_everywhere(address.rpartition(":")[0])):
        raise ControlError(
            f"control plane: {endpoint} is not an address of one interface; use ipc://PATH, or "
            "tcp://ADDRESS:PORT with this host's address in the network of the generators"
        )
    if scheme == "tcp" and keys is None:
        raise ControlError(f"control plane: {endpoint} is a network address, which needs the run's keys")


def _require_keys(socket: "zmq.Socket[bytes]", keys: LearnerKeys) -> ThreadAuthenticator:
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
