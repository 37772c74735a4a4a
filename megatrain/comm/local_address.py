"""The address at which other hosts reach this host: from the named interface, or from the route to the job's store."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from megatrain.contracts.errors import CommunicationError

_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR, the request for the IPv4 address of an interface."""
_ADDRESS_IN_REQUEST = slice(20, 24)
_LOOPBACK = "127.0.0.1"
_GLOBAL_SCOPE = "00"
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def local_address(network_interface: str, store_address: str, ipv6_addresses: Path = _IPV6_ADDRESSES) -> str:
    """Return this host's address.

    network_interface: the name of the interface; the first of several names, separated by commas, counts. If empty, the
    result is this host's address on the route to `store_address` ("host:port"). If both are empty, all ranks are on
    this machine, and the result is the loopback address.
    ipv6_addresses: the kernel's list of IPv6 addresses, for an interface without an IPv4 address.
    Raises: CommunicationError naming the interface or the store.
    """
    if network_interface:
        return _of_interface(network_interface.split(",")[0], ipv6_addresses)
    if not store_address:
        return _LOOPBACK
    host, _, port = store_address.rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing: the kernel only chooses the route
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise CommunicationError(f"this host has no network path to the store at {store_address}: {error}") from error


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address: on every machine it refers to that machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _of_interface(name: str, ipv6_addresses: Path) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(request[_ADDRESS_IN_REQUEST])
        except OSError as error:
            found = _ipv6_of(name, ipv6_addresses)
            if found is not None:
                return found
            raise CommunicationError(
                f'runtime.network_interface="{name}": {socket.gethostname()} has no address on this interface '
                f"({error.strerror})"
            ) from error


def _ipv6_of(name: str, addresses: Path) -> str | None:
    try:
        lines = addresses.read_text().splitlines()
    except OSError:
        return None
    for digits, _, _, scope, _, interface in map(str.split, lines):
        if interface == name and scope == _GLOBAL_SCOPE:
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None
