"""The state of one GPU or link over its readings: growth of its counters, start of its throttling, and its problems.

Pure functions: no I/O and no clock. Counters restart when a driver is loaded again, so a counter with a smaller value
than before has started again from zero. `DeviceLimits` has the limits beyond which a GPU or a link has a problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.contracts.records.diag_records import DeviceProblem, DeviceProblemKind
from megatrain.formatting import count_text
from megatrain_job.devices.gpu_readings import FAULTY_REASONS, throttle_text
from megatrain_job.failures.xids import XidKind, xid_of

WINDOW_S = 3600.0
"""The time for which an error is reported."""
_MAX_TIMES = 60
_GPU_COUNTERS = ("uncorrected_errors", "corrected_errors", "nvlink_errors", "pcie_replays")
_LINK_COUNTERS = ("rx_errors", "tx_errors", "symbol_errors", "downs")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits chosen by megatrain, unless a source is named. Errors are counted over the last hour."""

    clock_drop: float = 0.05
    """Fraction of a GPU's earlier clock. A drop of this size is evidence for a straggler."""
    throttled_s: float = 30.0
    """The time for which a GPU can be throttled by heat or the power supply without being reported."""
    corrected_errors: int = 1000
    nvlink_errors: int = 100
    pcie_replays: int = 480
    """Eight per minute, the limit in the health watches of NVIDIA's DCGM."""
    link_errors: int = 100
    """Errors of received and sent data, symbol errors included."""
    silent_s: float = 60.0
    silent_intervals: float = 5.0
    """A host's devices are silent if there is no reading for longer than `silent_s` and this many intervals."""

    def silent_after_s(self, interval_s: float) -> float:
        return max(self.silent_s, self.silent_intervals * interval_s)


LIMITS = DeviceLimits()


def gpu_name(gpu: int, host: str, rank: int) -> str:
    """Return "GPU 3 of host-2 (rank 19)"."""
    return f"GPU {gpu} of {host}" + (f" (rank {rank})" if rank >= 0 else "")


def mhz_text(mhz: float) -> str:
    return f"{mhz:,.0f} MHz"


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter's value, and its growth within the last hour as (unix seconds, increase)."""

    value: float = math.nan
    times: tuple[tuple[float, float], ...] = ()

    def at(self, now_s: float, value: float) -> Counter:
        """Return the counter with a newer value; NaN: the value was not reported."""
        times = tuple(growth for growth in self.times if growth[0] > now_s - WINDOW_S)
        if math.isnan(value):
            return replace(self, times=times)
        grown = 0.0 if math.isnan(self.value) else value if value < self.value else value - self.value
        if grown > 0.0:
            last = times[-1] if len(times) == _MAX_TIMES else None
            times = (*times[:-1], (now_s, last[1] + grown)) if last is not None else (*times, (now_s, grown))
        return Counter(value, times)

    @property
    def grown(self) -> int:
        """Increase of the counter within the last hour."""
        return int(sum(count for _, count in self.times))

    @property
    def since_s(self) -> float | None:
        return self.times[0][0] if self.times else None


@dataclass(frozen=True, slots=True)
class GpuState:
    """The state of a GPU; `row` is its newest reading."""

    row: Row = field(default_factory=dict)
    counters: Mapping[str, Counter] = field(default_factory=dict)
    throttled_since_s: float | None = None
    faulty_since_s: float | None = None
    """The time since which the GPU does not answer, or needs a recovery or replacement."""

    def at(self, row: Row) -> GpuState:
        """Return the state after a newer row. Counters and throttling that it does not report are unchanged."""
        now_s = row["at_ns"] / 1e9
        counters = {name: self.counters.get(name, Counter()).at(now_s, row[name]) for name in _GPU_COUNTERS}
        is_throttled = bool(_bits(row["throttle_reasons"]) & FAULTY_REASONS)
        if math.isnan(row["throttle_reasons"]):
            is_throttled = self.throttled_since_s is not None
        is_faulty = bool(row["error"] or row["recovery"] or row["has_remap_failed"] == 1.0)
        return GpuState(
            row,
            counters,
            (self.throttled_since_s or now_s) if is_throttled else None,
            (self.faulty_since_s or now_s) if is_faulty else None,
        )

    def problems(self) -> Iterator[DeviceProblem]:
        """Yield the problems of the GPU, the worst first."""
        row = self.row
        if row["gpu"] < 0:
            text = f"no readings of the GPUs of {row['host']}: {row['error']}"
            yield DeviceProblem(DeviceProblemKind.TELEMETRY_SILENT, row["host"], text, self.faulty_since_s)
            return
        who = gpu_name(row["gpu"], row["host"], row["rank"])
        for kind, text, since_s in (*self._failures(), *self._weaknesses()):
            ranks = (int(row["rank"]),) if row["rank"] >= 0 else ()
            yield DeviceProblem(kind, row["host"], f"{who} {text}", since_s, ranks)

    def _failures(self) -> Iterator[tuple[DeviceProblemKind, str, float | None]]:
        row, failing, since_s = self.row, DeviceProblemKind.GPU_FAILING, self.faulty_since_s
        if row["error"]:
            yield failing, f"does not answer its driver: {row['error']}", since_s
        if row["recovery"]:
            yield failing, f"is broken: the driver asks for {row['recovery']}", since_s
        if row["has_remap_failed"] == 1.0:
            yield failing, "has a bad memory row that could not be remapped: replace the GPU", since_s
        errors = self.counters["uncorrected_errors"]
        if errors.grown:
            yield (
                failing,
                f"had {count_text(errors.grown, 'uncorrected memory error')} within the hour: evict its host",
                errors.since_s,
            )

    def _weaknesses(self) -> Iterator[tuple[DeviceProblemKind, str, float | None]]:
        row, degraded, now_s = self.row, DeviceProblemKind.GPU_DEGRADED, self.row["at_ns"] / 1e9
        is_reported = not math.isnan(row["throttle_reasons"])
        if is_reported and self.throttled_since_s is not None and now_s - self.throttled_since_s >= LIMITS.throttled_s:
            yield degraded, f"is slowed down: {slowdown_text(row)}", self.throttled_since_s
        if row["is_reset_pending"] == 1.0:
            yield degraded, "has bad memory that a reset of the GPU will retire", None
        for name, most, noun in (
            ("corrected_errors", LIMITS.corrected_errors, "corrected memory errors"),
            ("nvlink_errors", LIMITS.nvlink_errors, "NVLink errors"),
            ("pcie_replays", LIMITS.pcie_replays, "PCIe replays"),
        ):
            counter = self.counters[name]
            if counter.grown >= most:
                text = f"had {counter.grown:,} {noun} within the hour (threshold: {most:,})"
                yield degraded, text, counter.since_s


@dataclass(frozen=True, slots=True)
class LinkState:
    """The state of a link; `row` is its newest reading."""

    row: Row = field(default_factory=dict)
    counters: Mapping[str, Counter] = field(default_factory=dict)
    was_up: bool = False
    best_mbps: float = 0.0
    down_since_s: float | None = None

    def at(self, row: Row) -> LinkState:
        now_s, is_up = row["at_ns"] / 1e9, row["is_up"] == 1.0
        speed = row["speed_mbps"] if is_up and not math.isnan(row["speed_mbps"]) else 0.0
        return LinkState(
            row,
            {name: self.counters.get(name, Counter()).at(now_s, row[name]) for name in _LINK_COUNTERS},
            self.was_up or is_up,
            max(self.best_mbps, speed),
            None if is_up else self.down_since_s or now_s,
        )

    def problems(self) -> Iterator[DeviceProblem]:
        """Yield the problems of the link; none if it was never up, because it is not in use."""
        row = self.row
        if not self.was_up:
            return
        for text, since_s in self._texts():
            kind = DeviceProblemKind.NETWORK_DEGRADED
            yield DeviceProblem(kind, row["host"], f"link {row['link']} of {row['host']} {text}", since_s)

    def _texts(self) -> Iterator[tuple[str, float | None]]:
        row, downs = self.row, self.counters["downs"]
        if row["is_up"] != 1.0:
            yield f"is {row['state']}; it was up before", self.down_since_s
        elif row["speed_mbps"] < self.best_mbps:
            yield f"runs at {row['speed_mbps'] / 1000:g} Gbit/s, down from {self.best_mbps / 1000:g}", None
        elif downs.grown:
            yield f"lost its connection within the hour: {count_text(downs.grown, 'change')}", downs.since_s
        errors = [self.counters[name] for name in ("rx_errors", "tx_errors", "symbol_errors")]
        count = sum(error.grown for error in errors)
        if count >= LIMITS.link_errors:
            since_s = min(error.since_s for error in errors if error.since_s is not None)
            yield f"had {count:,} errors within the hour (threshold: {LIMITS.link_errors:,})", since_s


def xid_problem(row: Row) -> DeviceProblem | None:
    """Return the problem that an Xid error indicates; None if the hardware is not the cause."""
    xid = xid_of(int(row["xid"]))
    if xid.kind not in (XidKind.HARDWARE, XidKind.HANDLED):
        return None
    is_handled = xid.kind is XidKind.HANDLED
    kind = DeviceProblemKind.GPU_DEGRADED if is_handled else DeviceProblemKind.GPU_FAILING
    who = gpu_name(row["gpu"], row["host"], row["rank"]) if row["gpu"] >= 0 else f"a GPU of {row['host']}"
    text = f"{who} reported Xid {xid.number}, {xid.meaning}: {xid.advice}"
    return DeviceProblem(kind, row["host"], text, row["at_ns"] / 1e9, (int(row["rank"]),) if row["rank"] >= 0 else ())


def slowdown_text(row: Row) -> str:
    """Return why and how far a GPU is slowed: "hardware thermal slowdown, 91 C, SM clock 1,050 MHz of 1,980 MHz"."""
    parts = [throttle_text(_bits(row["throttle_reasons"]) & FAULTY_REASONS)]
    if not math.isnan(row["temperature_c"]):
        limit = row["slowdown_temperature_c"]
        own = "" if math.isnan(limit) else f", it slows down at {limit:.0f} C"
        parts.append(f"{row['temperature_c']:.0f} C{own}")
    if not math.isnan(row["sm_clock_mhz"]):
        most = row["max_sm_clock_mhz"]
        of_most = "" if math.isnan(most) else f" of {mhz_text(most)}"
        parts.append(f"SM clock {mhz_text(row['sm_clock_mhz'])}{of_most}")
    return ", ".join(part for part in parts if part)


def _bits(value: float) -> int:
    return 0 if math.isnan(value) else int(value)
