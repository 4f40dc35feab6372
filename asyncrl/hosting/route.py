"""The address of this host that the other hosts of a run reach, and the ports that hosts must reach.

The address is that of the route to the others.
"""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from asyncrl.config.addresses import AUTO, CONTROL_PORT, STORE_PORT, beside, filled_in, host_of, is_loopback
from asyncrl.config.schema import Config
from asyncrl.errors import RunError

# Names or addresses of other hosts of the run, with spaces between them.
PEERS_VARIABLE = "ASYNCRL_PEERS"
# Addresses of documentation (RFC 5737, RFC 3849), to which only a default route leads.
ANYWHERE = ("192.0.2.1", "2001:db8::1")
_ANY_PORT = 9
LOOKUP_S = 10.0  # longest wait for the address of a name; a system may ask servers for minutes
_REDIS_PORT = 6379


class Reach(NamedTuple):
    """Hosts of a run, and an address that they must reach."""

    who: str
    host: str
    port: int  # 0 is any
    what: str
    key: str
    is_encrypted: bool = False

    def __str__(self) -> str:
        where = f"{self.host} at port {self.port}" if self.port else f"every port of {self.host}"
        text = f"{self.who} must reach {where}: {self.what} ({self.key})"
        return text if self.is_encrypted else f"{text}, not encrypted"


def reaches(config: Config, learner: str) -> list[Reach]:
    """Return which hosts must reach what, if the first host of the learner has the address `learner`."""
    control = str(filled_in(config.control.bind or AUTO, learner, CONTROL_PORT))
    store = urlsplit(config.store.url or str(filled_in(config.store.bind or AUTO, learner, STORE_PORT)))
    who, key = "generators-*", "store.bind"
    if config.store.url:
        who, key = f"learner-0, {who}", "store.url"
    place, is_encrypted = (store.hostname or "", store.port or _REDIS_PORT), store.scheme == "rediss"
    found = [Reach(who, *place, "store", key, is_encrypted), *of_generators(control)]
    if config.weights.transport == "nccl":
        found.append(Reach("generators-* and back", host_of(control), 0, "weights", "weights.transport"))
    if config.cluster.learner_hosts > 1:
        found.append(_at(beside(control), "learner-*", "meeting of the learner's hosts"))
        found.append(Reach("learner-*", "learner-*", 0, "gradients", "cluster.learner_hosts"))
    return found


def of_generators(control: str) -> list[Reach]:
    """Return what generators must reach of a learner whose control plane is at tcp://HOST:PORT."""
    weights = Reach("generators-*", host_of(control), 0, "weights", "control.bind")
    return [_at(control, weights.who, "control plane"), weights]


def in_clear(ports: Iterable[Reach]) -> str:
    """Warn of what hosts send each other without encryption; empty if there is nothing."""
    found = {one.what: one.key for one in ports if not (one.is_encrypted or is_loopback(one.host))}
    named = ", ".join(f"{what} ({key})" for what, key in found.items())
    cure = "use a network of your own, or a tunnel between the hosts, such as WireGuard (docs/security.md)"
    return f"not encrypted between hosts: {named}; {cure}" if found else ""


def _at(bind: str, who: str, what: str) -> Reach:
    return Reach(who, host_of(bind), int(bind.rpartition(":")[2]), what, "control.bind", is_encrypted=True)


def unreached(
    ports: Iterable[Reach], wait_s: float, on_refusal: Callable[[str], object] = lambda text: None
) -> Iterator[str]:
    """Yield what this host does not reach, each after `wait_s` at most, with the cure.

    A refusal counts as an answer, because perhaps nothing listens there yet: its text goes to `on_refusal`.
    """
    for one in ports:
        try:
            if one.port:
                socket.create_connection((one.host, one.port), wait_s).close()
        except OSError as error:
            said = (
                f"{socket.gethostname()} does not reach {one.host} at port {one.port} "
                f"({error.strerror or error}), the {one.what} of the run; open it between these hosts, in "
                f"firewalls and security groups, or choose another port with {one.key}"
            )
            if not isinstance(error, ConnectionRefusedError):
                yield said
            else:
                on_refusal(said)


def address_towards(peer: str) -> str:
    """Return our address on the interface that reaches `peer`. Raises OSError."""
    family, where = _looked_up(peer)
    # A datagram socket that connects sends nothing.
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect(where)
        return str(route.getsockname()[0])


def _looked_up(host: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return a host's first address, as calls of the system take it. Raises OSError."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0])
        except (OSError, UnicodeError) as error:
            found.append(error)

    asking = threading.Thread(target=ask, name="lookup", daemon=True)
    asking.start()
    asking.join(LOOKUP_S)
    match found:
        case [(family, _, _, _, where)]:
            return family, where
        case [OSError() as error]:
            raise error
    raise OSError(errno.ENOENT, str(found[0]) if found else f"no answer about its name in {LOOKUP_S:g} s")


def interface_towards(peer: str) -> str:
    """Return the name of our interface that reaches `peer`. Raises OSError without a route."""
    ours = address_towards(peer)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == ours for one in addresses):
            return str(name)
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), ours)


def peers_in(environment: Mapping[str, str]) -> list[str]:
    """Return the other hosts of the run that an environment names."""
    return environment.get(PEERS_VARIABLE, "").split()


def with_addresses(config: Config, peers: Sequence[str]) -> Config:
    """Return the config with our address in place of `auto`: of the route to `peers`, or the default route.

    Raises RunError without such a route, with several addresses, or if we cannot listen at a named address.
    """
    ports, asking = {"control": CONTROL_PORT, "store": STORE_PORT}, dict[str, str]()
    for name, port in ports.items():
        if (bind := getattr(config, name).bind) is None:
            continue
        if filled_in(bind, "", port) != bind:
            asking[name] = bind
            continue
        try:
            family, (address, _, *scope) = _looked_up(host_of(bind))
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0, *scope))
        except OSError as error:
            found = f"{name}.bind is {bind}, at which this host cannot listen ({error.strerror or error})"
            cure = "write auto, or tcp://HOST:PORT with an address of this host (`ip address` lists them)"
            raise RunError(f"{found}; {cure}") from error
    if not asking:
        return config
    key, bind = next(iter(asking.items()))
    address = _our_address(f"{key}.bind is {bind}", f"name it: {key}.bind=tcp://HOST:PORT", peers)
    changed = {
        name: getattr(config, name).model_copy(update={"bind": filled_in(bind, address, ports[name])})
        for name, bind in asking.items()
    }
    return config.model_copy(update=changed)


def _our_address(found: str, cure: str, peers: Sequence[str]) -> str:
    addresses, failures = dict[str, str](), list[str]()
    for peer in peers or ANYWHERE:
        try:
            addresses.setdefault(address_towards(peer), peer)
        except OSError as error:
            failures.append(f"{peer} ({error.strerror or error})")
    if not peers:  # IPv4 if there is a choice
        addresses = dict([*addresses.items()][:1])
    if len(addresses) == 1 and not (peers and failures):
        return next(iter(addresses))
    if failures:
        to = f"there is no route to {', '.join(failures)}" if peers else "this host has no default route"
        raise RunError(f"{found}, but {to}; {cure}, with an address of this host that the others reach")
    ways = ", ".join(f"{peer} from {address}" for address, peer in addresses.items())
    raise RunError(f"{found}, but this host reaches {ways}; {cure}, with the one that all others reach")
