"""Who can reach an address: this machine only, one network, or everybody."""

import ipaddress
import socket


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
