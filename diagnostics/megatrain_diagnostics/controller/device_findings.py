"""Adds the evidence of GPUs and links to findings. A result is reused for ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from megatrain_diagnostics.analysis.device_evidence import with_devices
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.events.source import EventSource

_FRESH_S = 10.0
_BACK_NS = 2 * 3600 * 10**9
_MAX_KNOWN = 64


class DeviceFindings:
    """Adds the evidence, and keeps it for a while. For one thread."""

    def __init__(self, events: EventSource, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._events, self._now_ns = events, now_ns
        self._known: dict[tuple[int, str], tuple[float, tuple[str, ...]]] = {}

    def with_devices(self, finding: Finding, round_number: int) -> Finding:
        """Return the finding with the evidence of devices appended."""
        key = (round_number, finding.key)
        at_s, evidence = self._known.get(key, (float("-inf"), ()))
        if time.monotonic() - at_s > _FRESH_S:
            found = with_devices(self._events, finding, round_number, self._now_ns() - _BACK_NS)
            evidence = found.evidence[len(finding.evidence) :]
            while len(self._known) >= _MAX_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[key] = (time.monotonic(), evidence)
        return replace(finding, evidence=(*finding.evidence, *evidence)) if evidence else finding
