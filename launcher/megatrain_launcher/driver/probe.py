"""Probes executors' liveness ports, which show whether an executor is dead or slow before its lease runs out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatrain.contracts.records.host_records import HostRecord
from megatrain_launcher.driver.actions import Probe
from megatrain_launcher.liveness import Liveness, LivenessReader

_logger = logging.getLogger(__name__)
_MAX_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe. `detail` is a sentence for the evidence."""

    host: str
    session: str
    liveness: Liveness
    detail: str
    at: float


class Prober:
    """Probes many hosts at once, but each host only once at a time. Not thread-safe."""

    def __init__(self, reader: LivenessReader, clock: Callable[[], float]) -> None:
        self._reader = reader
        self._clock = clock
        self._pool = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="probe")
        self._lock = threading.Lock()
        self._under_way: set[tuple[str, str]] = set()
        self._results: list[ProbeResult] = []
        self._contacted: set[tuple[str, str]] = set()

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return bool(self._under_way or self._results)

    def reach_new_hosts(self, hosts: Iterable[HostRecord]) -> None:
        """Connect once to the port of each new host: a later refusal proves death only if the port was reachable."""
        for host in hosts:
            if host.liveness_port and (host.host, host.session) not in self._contacted:
                self._contacted.add((host.host, host.session))
                self._pool.submit(self._contact, host)

    def start(self, probe: Probe) -> None:
        with self._lock:
            if (probe.host, probe.session) in self._under_way:
                return
            self._under_way.add((probe.host, probe.session))
        self._pool.submit(self._probe, probe)

    def take(self) -> tuple[ProbeResult, ...]:
        """Return the results that arrived since the last call."""
        with self._lock:
            results, self._results = self._results, []
        return tuple(results)

    def close(self) -> None:
        """Cancel the queued probes and wait for the running ones, about a second at most."""
        self._pool.shutdown(cancel_futures=True)

    def _contact(self, host: HostRecord) -> None:
        liveness, detail = self._reader.ask(host.address, host.liveness_port, host.session)
        if liveness is not Liveness.ALIVE:
            _logger.info(
                "host %s is registered, but %s; its death would be detected only when its lease ends", host.host, detail
            )

    def _probe(self, probe: Probe) -> None:
        liveness, detail = self._reader.ask(probe.address, probe.port, probe.session)
        with self._lock:
            self._under_way.discard((probe.host, probe.session))
            self._results.append(ProbeResult(probe.host, probe.session, liveness, detail, self._clock()))
