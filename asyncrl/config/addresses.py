"""Who can reach an address: this machine only, one network, or everybody; and what may be sent to a store there."""

import ipaddress
import socket
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

_NO = ("", "0", "f", "false", "n", "no")


def is_loopback(host: str) -> bool:
    """Only processes of this machine reach it. A name other than localhost may lead anywhere, so it does not count."""
    if host == "localhost":
        return True
    address = _address(host)
    return address is not None and (address.is_loopback or _mapped(address).is_loopback)


def is_everywhere(host: str) -> bool:
    """To listen there is to listen on every interface: "", "*", 0.0.0.0, ::, and other spellings of them."""
    if host in ("", "*"):
        return True
    address = _address(host)
    return address is not None and (address.is_unspecified or _mapped(address).is_unspecified)


def one_interface(key: str, host: str) -> None:
    """Raises ValueError for an address of every interface."""
    if is_everywhere(host):
        raise ValueError(
            f"{key} would listen on every interface of this host ({host or 'no address'}); name the address of one of them: "
            "127.0.0.1 for this host only, or this host's address in the network of those who ask (`ip address` lists them)"
        )


def one_place(key: str, bind: str) -> None:
    """Raises ValueError for `tcp://HOST:PORT` on every interface, or with a port that there is not."""
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    one_interface(key, host)
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"{key} names port {port}; allowed is 1 to 65535; choose a free one")


def open_ways(url: str) -> Iterator[str]:
    """What is wrong with sending a run's frames and password to this store; nothing for one of this machine."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or is_loopback(parts.hostname or ""):
        return
    if parts.scheme != "rediss":
        yield "it is on another host and redis:// is not encrypted: use rediss://"
    asked = parse_qs(parts.query, keep_blank_values=True)
    for name, off in (("ssl_cert_reqs", ("none", "optional")), ("ssl_check_hostname", _NO)):
        if asked.get(name, ["required"])[-1].lower() in off:
            yield f"{name}={asked[name][-1]} lets anybody pose as the store: leave it out, name your authority with ssl_ca_certs"


def _mapped(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address in ::ffff:0.0.0.0, else the same."""
    return (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name. The system also takes 0, 0x7f.1 and 127.1 for addresses."""
    bare = host.removeprefix("[").removesuffix("]").partition("%")[0]
    try:
        return ipaddress.ip_address(bare)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(bare))
    except OSError:
        return None
