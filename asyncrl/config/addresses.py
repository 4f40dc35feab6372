"""Network addresses in a config: which hosts can reach them, and whether a store is protected well enough."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
AUTO = "auto"
"""Stands for the address at which the other hosts of a run reach this one."""
STORE_PORT, CONTROL_PORT = 16379, 16380  # below those that the kernel gives to clients
_NO = ("", "0", "f", "false", "n", "no")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address. Of host names, only localhost is known to be."""
    if host == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def stays_here(url: str) -> bool:
    """Return whether only this machine reaches a store's URL, or an address that a process listens on."""
    parts = urlsplit(url)
    return parts.scheme == "unix" or is_loopback(parts.hostname or "")


def is_everywhere(host: str) -> bool:
    """Return whether the address means every interface: "", "*", 0.0.0.0, :: and their other spellings."""
    if host in ("", "*"):
        return True
    address = _address(host)
    return address is not None and address.is_unspecified


def one_interface(host: str) -> str:
    """Return `host`. Raises ValueError if it means every interface."""
    if is_everywhere(host):
        raise ValueError(
            f"would listen on every interface of this host ({host or 'no address'}); give the address of "
            "one: 127.0.0.1 for this host only, or one that other hosts reach (`ip address` lists them)"
        )
    return host


def one_address(bind: str) -> str:
    """Return `tcp://HOST:PORT`. Raises ValueError if it means every interface or has an impossible port."""
    if bind != AUTO:
        urlsplit(bind)  # raises ValueError for brackets around no IPv6 address
        one_interface(host_of(bind))
        port = bind.rpartition(":")[2]
        if not 1 <= int(port) <= 65535:
            raise ValueError(f"names port {port}; allowed is 1 to 65535; choose a free one")
    return bind


def host_of(bind: str) -> str:
    """Return the address in `tcp://HOST:PORT`, as the system's calls take it: IPv6 without brackets."""
    return bind.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")


def filled_in(bind: str | None, address: str, port: int) -> str | None:
    """Return `bind` with `address` in place of `auto`, and with `port` if it names none."""
    if bind is None or AUTO not in (bind, host_of(bind)):
        return bind
    named = port if bind == AUTO else bind.rpartition(":")[2]
    return f"tcp://[{address}]:{named}" if ":" in address else f"tcp://{address}:{named}"


def beside(bind: str) -> str:
    """Return the address with the next port, where the hosts of a learner meet."""
    host, _, port = bind.rpartition(":")
    return f"{host}:{int(port) + 1}"


def insecurities(url: str) -> Iterator[str]:
    """Yield each reason why a store is not safe for a run's frames and password; a local store has none."""
    if stays_here(url):
        return
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        yield "it is on another host and redis:// is not encrypted: use rediss://"
    asked = parse_qs(parts.query, keep_blank_values=True)
    for name, off in (("ssl_cert_reqs", ("none", "optional")), ("ssl_check_hostname", _NO)):
        if asked.get(name, ["required"])[-1].lower() in off:
            cure = "leave it out, name your authority with ssl_ca_certs"
            yield f"{name}={asked[name][-1]} lets any server pose as the store: {cure}"


def _address(host: str) -> Address | None:
    """Parse an address; return None for a name. Like the system, accept 0, 0x7f.1 and 127.1.

    An IPv4 address that is mapped to IPv6 is itself.
    """
    bare = host.removeprefix("[").removesuffix("]").partition("%")[0]
    with suppress(ValueError):
        address = ipaddress.ip_address(bare)
        return getattr(address, "ipv4_mapped", None) or address
    with suppress(OSError):
        return ipaddress.IPv4Address(socket.inet_aton(bare))
    return None
