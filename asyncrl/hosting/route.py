"""The address of this host that the other hosts of a run reach, which is that of the route to them."""

import errno
import os
import socket
from collections.abc import Mapping, Sequence

import psutil

from asyncrl.config.addresses import CONTROL_PORT, STORE_PORT, filled_in
from asyncrl.config.schema import Config
from asyncrl.errors import RunError

# Names or addresses of other hosts of the run, with spaces between them.
PEERS_VARIABLE = "ASYNCRL_PEERS"
# Addresses of documentation (RFC 5737, RFC 3849), to which only a default route leads.
ANYWHERE = ("192.0.2.1", "2001:db8::1")
_ANY_PORT = 9


def address_towards(peer: str) -> str:
    """Return our address on the interface that reaches `peer`. Raises OSError."""
    (family, kind, _, _, where), *_ = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)
    # A datagram socket that connects sends nothing.
    with socket.socket(family, kind) as route:
        route.connect(where)
        return str(route.getsockname()[0])


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

    Raises RunError if there is no such route, or more than one such address.
    """
    binds = {"control": config.control.bind, "store": config.store.bind}
    ports = {"control": CONTROL_PORT, "store": STORE_PORT}
    asking = [name for name, bind in binds.items() if filled_in(bind, "", ports[name]) != bind]
    if not asking:
        return config
    key = f"{asking[0]}.bind"
    address = _our_address(f"{key} is {binds[asking[0]]}", f"name it: {key}=tcp://HOST:PORT", peers)
    changed = {
        name: getattr(config, name).model_copy(update={"bind": filled_in(binds[name], address, ports[name])})
        for name in asking
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
