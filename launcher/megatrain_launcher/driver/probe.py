"""Asking an executor's liveness port whether it lives, to tell a dead one from a slow one before its lease runs out.

Whoever connects is sent the session. A refused connection, or another session, proves the death of the one that was
asked for; silence proves nothing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

from megatrain_launcher.driver.actions import Probe

_ANSWER_S = 1.0
_MAX_ANSWER_BYTES = 256
_MAX_AT_ONCE = 32
_PORTS = 65536


class Vitality(StrEnum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What became of a probe. `detail` is a sentence, for evidence."""

    host: str
    session: str
    vitality: Vitality
    detail: str
    at: float


def ask(address: str, port: int, session: str, *, timeout_s: float = _ANSWER_S) -> tuple[Vitality, str]:
    """Return whether the executor of `session` lives behind a port, and how that is known."""
    place = f"{address}:{port}"
    if not 0 < port < _PORTS:
        return Vitality.UNKNOWN, f"{place} is no address"
    deadline = time.monotonic() + timeout_s
    heard = b""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            while len(heard) < _MAX_ANSWER_BYTES:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                part = connection.recv(_MAX_ANSWER_BYTES)
                if not part:
                    break
                heard += part
    except ConnectionRefusedError:
        return Vitality.DEAD, f"{place} refuses connections: no executor is there"
    except (OSError, ValueError) as error:  # an address may be no name at all
        return Vitality.UNKNOWN, f"{place} does not answer ({error})"
    found = heard.decode(errors="replace").strip()
    if found == session:
        return Vitality.ALIVE, f"{place} answers: its executor lives"
    if not found:
        return Vitality.UNKNOWN, f"{place} took the connection and said nothing"
    return Vitality.DEAD, f"{place} is another executor's by now"


class Prober:
    """Asks many hosts at once; a host that is being asked is not asked twice. Methods are for one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pool = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="probe")
        self._lock = threading.Lock()
        self._under_way: set[tuple[str, str]] = set()
        self._results: list[ProbeResult] = []

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return bool(self._under_way or self._results)

    def start(self, probe: Probe) -> None:
        with self._lock:
            if (probe.host, probe.session) in self._under_way:
                return
            self._under_way.add((probe.host, probe.session))
        self._pool.submit(self._ask, probe)

    def take(self) -> tuple[ProbeResult, ...]:
        """Return what came in since the last call."""
        with self._lock:
            results, self._results = self._results, []
        return tuple(results)

    def close(self) -> None:
        """Wait for the probes under way, a second at most."""
        self._pool.shutdown(cancel_futures=True)

    def _ask(self, probe: Probe) -> None:
        vitality, detail = ask(probe.address, probe.port, probe.session)
        with self._lock:
            self._under_way.discard((probe.host, probe.session))
            self._results.append(ProbeResult(probe.host, probe.session, vitality, detail, self._clock()))
