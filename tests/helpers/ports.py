"""Ports for servers that tests start.

A port that the system assigns is free only until it is closed again: two concurrent tests may start a server on the
same port. So each process of the tests reserves a range of ports, below those that the system assigns. A socket that is
bound to the first port of a range reserves it, for all runs on this machine.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from functools import cache

_FIRST, _RANGE, _NUM_RANGES = 12_000, 500, 40


def free_ports(count: int) -> list[int]:
    """Return different ports on which no process listens, and which no other test process uses."""
    found: list[int] = []
    while len(found) < count:
        port = next(_own_range())
        with socket.socket() as probe:
            if _is_bound(probe, port):
                found.append(port)
    return found


@cache
def _own_range() -> Iterator[int]:
    """Yield the ports of this process repeatedly."""
    for first in range(_FIRST, _FIRST + _NUM_RANGES * _RANGE, _RANGE):
        reservation = socket.socket()
        if _is_bound(reservation, first):
            return _ports_of(first, reservation)
        reservation.close()
    raise RuntimeError(f"all {_NUM_RANGES} ranges of ports from {_FIRST} on are in use; end other runs of the tests")


def _ports_of(first: int, reservation: socket.socket) -> Iterator[int]:
    with reservation:
        yield from itertools.cycle(range(first + 1, first + _RANGE))


def _is_bound(one: socket.socket, port: int) -> bool:
    try:
        one.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
