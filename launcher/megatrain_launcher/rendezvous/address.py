"""The address by which other hosts reach this one: the one that it reaches etcd from, unless it is configured."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from megatrain_job.coordination.settings import Endpoint

_LOOPBACK = "127.0.0.1"


def own_address(endpoints: Sequence[Endpoint]) -> str:
    """Return the address of the interface that leads to the first endpoint which has a route. Sends nothing.

    With etcd on loopback or a unix socket that is loopback: all its clients are on this machine. Without any route, it
    is the host's name.
    """
    for endpoint in endpoints:
        if endpoint.path:
            return _LOOPBACK
        with suppress(OSError):
            for family, _, _, _, address in socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM):
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)  # a datagram socket only chooses its route
                    return str(probe.getsockname()[0])
    return socket.getfqdn()
