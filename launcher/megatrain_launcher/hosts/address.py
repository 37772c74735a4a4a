"""Finds the address by which other hosts reach this host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from megatrain.contracts.errors import ConfigError
from megatrain_job.coordination.settings import Endpoint

_SIOCGIFADDR = 0x8915
_DISCARD_PORT = 9
_LOOPBACK = "127.0.0.1"


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises: ConfigError when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            problem = f'runtime.network_interface="{interface}": {error.strerror}'
            hint = "name one that `ip address` lists with an IPv4 address, or give --local-addr=ADDRESS"
            raise ConfigError([f"{problem}; {hint}"]) from error
    return socket.inet_ntoa(found[20:24])


def address_towards(endpoint: Endpoint) -> str:
    """Return this host's address on the route to an endpoint; for a unix socket, the loopback address.

    Sends nothing except a name look-up.
    Raises: ConfigError when the name is unknown or there is no route to it.
    """
    if endpoint.path:
        return _LOOPBACK  # all clients of a unix socket are on this machine
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            address: str = probe.getsockname()[0]
    except OSError as error:
        problem = f"--rdzv-endpoint: no route from here to {endpoint}: {error.strerror or error}"
        raise ConfigError([f"{problem}; check the name, or give --local-addr=ADDRESS"]) from error
    return address


def own_address(endpoints: Sequence[Endpoint]) -> str:
    """Return `address_towards` the first endpoint to which there is a route; this host's name if there is none."""
    for endpoint in endpoints:
        with suppress(ConfigError):
            return address_towards(endpoint)
    return socket.getfqdn()


def resolve(name: str) -> str:
    """Return an IP address of `name`, this host's name, that other hosts can reach; empty if there is none."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, _DISCARD_PORT, type=socket.SOCK_DGRAM)}
    except OSError:
        return ""
    # a machine's own name often resolves to a loopback address on that machine
    usable = [text for text in found if not (ip := ipaddress.ip_address(text.partition("%")[0])).is_loopback
              and not ip.is_link_local]  # fmt: skip
    return min(usable, key=lambda text: (":" in text, text), default="")
