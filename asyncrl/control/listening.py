"""The learner's listening socket, a private socket file or one address behind CURVE, and its callers'."""

import os
import resource
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from asyncrl.config.addresses import is_everywhere
from asyncrl.control.curve import GeneratorKeys, LearnerKeys, present_keys, require_keys
from asyncrl.control.messages import MAX_REPORT_BYTES, set_options
from asyncrl.errors import ControlError

# Enough for the learner and for strangers' connections, which take one each until the handshake times out.
_WANTED_DESCRIPTORS = 1 << 16


def listen(
    context: "zmq.Context[Any]", endpoint: str, keys: LearnerKeys | None, *, max_bytes: int = MAX_REPORT_BYTES
) -> "tuple[zmq.Socket[bytes], ThreadAuthenticator | None]":
    """A bound ROUTER, and its authenticator: stop it before the context ends. Raises ControlError."""
    _require_private(endpoint, keys)
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    set_options(router, max_bytes=max_bytes)
    router.setsockopt(zmq.IPV6, "[" in endpoint)
    authenticator = None
    if endpoint.startswith("tcp://") and keys is not None:
        authenticator = require_keys(router, keys)
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
        router.close()
        if authenticator is not None:
            authenticator.stop()
        raise ControlError(
            f"control plane: cannot listen on {endpoint}: {error}; set control.bind to a free address"
        ) from error
    if endpoint.startswith("ipc://"):
        os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    return router, authenticator


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
