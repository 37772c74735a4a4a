"""Asking executors' liveness ports whether they live, to tell a dead one from a slow one before its lease runs out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatrain.contracts.host_records import HostRecord
from megatrain_launcher.driver.actions import Probe
from megatrain_launcher.executor.liveness import LivenessReader, Vitality

_logger = logging.getLogger(__name__)
_MAX_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What became of a probe. `detail` is a sentence, for evidence."""

    host: str
    session: str
    vitality: Vitality
    detail: str
    at: float


class Prober:
    """Asks many hosts at once; a host that is being asked is not asked twice. Methods are for one thread."""

    def __init__(self, reader: LivenessReader, clock: Callable[[], float]) -> None:
        self._reader = reader
        self._clock = clock
        self._pool = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="probe")
        self._lock = threading.Lock()
        self._under_way: set[tuple[str, str]] = set()
        self._results: list[ProbeResult] = []
        self._greeted: set[tuple[str, str]] = set()

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return bool(self._under_way or self._results)

    def greet(self, hosts: Iterable[HostRecord]) -> None:
        """Reach each new host's port while it lives: a port that refuses later is a proof of death only then."""
        for host in hosts:
            if host.liveness_port and (host.host, host.session) not in self._greeted:
                self._greeted.add((host.host, host.session))
                self._pool.submit(self._greet, host)

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

    def _greet(self, host: HostRecord) -> None:
        vitality, detail = self._reader.ask(host.address, host.liveness_port, host.session)
        if vitality is not Vitality.ALIVE:
            _logger.info("host %s is registered, but %s; its death would be known by its lease only", host.host, detail)

    def _ask(self, probe: Probe) -> None:
        vitality, detail = self._reader.ask(probe.address, probe.port, probe.session)
        with self._lock:
            self._under_way.discard((probe.host, probe.session))
            self._results.append(ProbeResult(probe.host, probe.session, vitality, detail, self._clock()))
