"""Keeps the state of the hosts' GPUs and links: their current problems, and evidence from them for findings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatrain.contracts.records.diag_records import DeviceProblem, DeviceProblemKind
from megatrain.formatting import age_text
from megatrain_diagnostics.analysis.device_evidence import with_devices
from megatrain_diagnostics.analysis.device_states import LIMITS, WINDOW_S, GpuState, LinkState, Row, xid_problem
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.events.source import EventSource
from megatrain_diagnostics.events.tables import Gpus, NetworkLinks, Table, Xids, columns_of

_FORGOTTEN_S = 2 * WINDOW_S
_MAX_XIDS = 1000

Key = tuple[str, str]
"""Host, and UUID of a GPU or name of a link."""
_FRESH_S = 10.0
_BACK_NS = 2 * 3600 * 10**9
_MAX_KNOWN = 64


class DeviceWatch:
    """A consumer of committed rows. `consume` and `tick` are called from one thread, `problems` from any."""

    def __init__(self, interval_s: Callable[[], float]) -> None:
        """`interval_s`: returns the time between two readings of a host; 0: devices are not read."""
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._gpus: dict[Key, GpuState] = {}
        self._links: dict[Key, LinkState] = {}
        self._xids: dict[tuple[str, str, int], DeviceProblem] = {}
        self._found: dict[Key, tuple[DeviceProblem, ...]] = {}
        self._uuids: dict[Key, str] = {}
        """(host, GPU number) -> UUID."""
        self._read_s: dict[str, float] = {}
        self._now_s = 0.0

    def consume(self, table: Table) -> None:
        """Receive rows that are on disk."""
        with self._lock:
            if isinstance(table, Gpus):
                for row in _rows(table):
                    self._take_gpu(row)
            elif isinstance(table, NetworkLinks):
                for row in _rows(table):
                    key = (row["host"], row["link"])
                    self._take(key, self._links, self._links.get(key, LinkState()).at(row))
            elif isinstance(table, Xids):
                for row in _rows(table):
                    self._take_xid(row)

    def tick(self, now_s: float) -> None:
        """Drop old Xid errors, and hosts without recent readings. Units: unix seconds."""
        with self._lock:
            self._now_s = now_s
            gone = {host for host, read_s in self._read_s.items() if now_s - read_s > _FORGOTTEN_S}
            old = [key for key, xid in self._xids.items() if now_s - (xid.since_unix_s or 0.0) > WINDOW_S]
            for key in old:
                del self._xids[key]
            if gone:
                self._read_s = {host: at_s for host, at_s in self._read_s.items() if host not in gone}
                self._gpus = {key: gpu for key, gpu in self._gpus.items() if key[0] not in gone}
                self._uuids = {key: uuid for key, uuid in self._uuids.items() if key[0] not in gone}
                self._links = {key: link for key, link in self._links.items() if key[0] not in gone}
                self._found = {key: problem for key, problem in self._found.items() if key[0] not in gone}

    def problems(self, connected: Collection[str]) -> tuple[DeviceProblem, ...]:
        """Return the problems, the worst first. `connected`: hosts with a connected streamer."""
        with self._lock:
            found = [problem for problems in self._found.values() for problem in problems]
            found += [*self._xids.values(), *self._silent(connected)]
        order = list(DeviceProblemKind)
        return tuple(sorted(found, key=lambda problem: (order.index(problem.kind), problem.host, problem.text)))

    def _take_gpu(self, row: Row) -> None:
        host, number = row["host"], str(row["gpu"])
        if row["gpu"] >= 0 and not row["error"]:  # the driver works, so a problem of all GPUs is over
            self._gpus.pop((host, "-1"), None)
            self._found.pop((host, "-1"), None)
        if row["uuid"]:
            self._uuids[host, number] = row["uuid"]
        uuid = self._uuids.get((host, number), number)  # a lost GPU cannot report its UUID
        self._take((host, uuid), self._gpus, self._gpus.get((host, uuid), GpuState()).at(row))

    def _take(self, key: Key, held: dict[Key, Any], state: GpuState | LinkState) -> None:
        held[key] = state
        self._read_s[key[0]] = max(self._now_s, self._read_s.get(key[0], 0.0))
        problems = tuple(state.problems())
        if problems:
            self._found[key] = problems
        else:
            self._found.pop(key, None)

    def _take_xid(self, row: Row) -> None:
        problem = xid_problem(row)
        if problem is not None and len(self._xids) < _MAX_XIDS:
            self._xids[row["host"], row["uuid"], int(row["xid"])] = problem

    def _silent(self, connected: Collection[str]) -> Iterator[DeviceProblem]:
        interval_s = self._interval_s()
        if not interval_s:
            return
        limit_s = LIMITS.silent_after_s(interval_s)
        for host, read_s in self._read_s.items():
            if host in connected and read_s and self._now_s - read_s > limit_s and (host, "-1") not in self._found:
                text = f"no readings of the GPUs and links of {host} for {age_text(read_s, self._now_s)}"
                yield DeviceProblem(DeviceProblemKind.TELEMETRY_SILENT, host, text, read_s)


def _rows(table: Gpus | NetworkLinks | Xids) -> Iterator[Mapping[str, Any]]:
    names = list(columns_of(type(table)))
    columns = [getattr(table, name).tolist() for name in names]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


class DeviceFindings:
    """Adds evidence from GPUs and links to findings. Evidence is cached for ten seconds. For one thread."""

    def __init__(self, events: EventSource, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._events, self._now_ns = events, now_ns
        self._known: dict[tuple[int, str], tuple[float, tuple[str, ...]]] = {}

    def with_devices(self, finding: Finding, round_number: int) -> Finding:
        """Return the finding with evidence from devices appended."""
        key = (round_number, finding.key)
        at_s, evidence = self._known.get(key, (float("-inf"), ()))
        if time.monotonic() - at_s > _FRESH_S:
            found = with_devices(self._events, finding, round_number, self._now_ns() - _BACK_NS)
            evidence = found.evidence[len(finding.evidence) :]
            while len(self._known) >= _MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[key] = (time.monotonic(), evidence)
        return replace(finding, evidence=(*finding.evidence, *evidence)) if evidence else finding
