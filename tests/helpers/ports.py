"""Ports for servers that tests start.

A port that the system gives to whoever asks is free only until it is closed again: of processes that test side by side,
two may start a server on the same one. So each of them takes ports from a range of its own, below those that the system
gives.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator

_FIRST, _RANGE = 12_000, 1_000


def _own_range() -> Iterator[int]:
    """Yield the ports of this process again and again. pytest-xdist names its processes gw0, gw1 and so on."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + number % 20 * _RANGE
    return itertools.cycle(range(first, first + _RANGE))


_own = _own_range()


def free_ports(count: int) -> list[int]:
    """Return different ports on which nobody listens, and which no other process of the tests takes."""
    found: list[int] = []
    while len(found) < count:
        port = next(_own)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found
