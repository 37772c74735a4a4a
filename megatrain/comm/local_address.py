"""The address at which other hosts reach this one: that of the interface that is named, or of the way to the master."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from megatrain.contracts.errors import CommunicationError

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: the IPv4 address of an interface."""
_ADDRESS_IN_REQUEST = slice(20, 24)
_LOOPBACK = "127.0.0.1"
_GLOBAL_SCOPE = "00"


def local_address(network_interface: str, master: str) -> str:
    """Return this host's address.

    network_interface: its name; of several, separated by commas, the first counts. Empty: what `master` ("host:port")
    sees of us. Without either, all ranks are on this machine.
    Raises: CommunicationError naming the interface or the master.
    """
    if network_interface:
        return _of_interface(network_interface.split(",")[0])
    if not master:
        return _LOOPBACK
    host, _, port = master.rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing: the system only looks for the way
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise CommunicationError(f"no way from this host to the master at {master}: {error}") from error


def is_loopback(address: str) -> bool:
    """Say whether an address means this very machine to whoever uses it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(request[_ADDRESS_IN_REQUEST])
        except OSError as error:
            found = _ipv6_of(name)
            if found is not None:
                return found
            raise CommunicationError(
                f'runtime.network_interface="{name}": {socket.gethostname()} has no address on it ({error.strerror})'
            ) from error


def _ipv6_of(name: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    for digits, _, _, scope, _, interface in map(str.split, lines):
        if interface == name and scope == _GLOBAL_SCOPE:
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None
