"""Measures how fast communication is, where it is slow, and how much of it is overlapped with compute.

The transfer time of an exchange is from the latest start among its members to the first end, so that waiting for a late
member does not count (OSDI'25). If the CPU clock times the work and no thread watches it, the recorded end is the time
at which the rank's CPU thread noticed it. Then an end is known only if the CPU thread was waiting for it, so an
exchange that was overlapped has no known transfer time. The end of the member that began last is not used either,
because its peers' data may already be in the receive buffers.

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md): algorithm bandwidth is the size of the whole vector
divided by the transfer time; bus bandwidth multiplies it by the part that each link carries: 2(n-1)/n in an
all-reduce, (n-1)/n in an all-gather or reduce-scatter, 1 in a message between two ranks. Groups and links more than
10 % slower than the median of their kind are reported (Greyhound).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import AXIS_ALL_REDUCES, Operation, operation_name
from megatrain.contracts.black_box.values import RecordFlag
from megatrain_diagnostics.analysis.exchanges import Exchanges, end_ns, find_exchanges
from megatrain_diagnostics.analysis.exposure import COMMUNICATION, Category, expose
from megatrain_diagnostics.analysis.overlap import Overlap, has_known_end, overlaps
from megatrain_diagnostics.analysis.slow_links import SlowLinks, find_slow_links
from megatrain_diagnostics.analysis.step_windows import StepEvents, step_windows
from megatrain_diagnostics.events.rows import is_any_of
from megatrain_diagnostics.events.tables import Flags, Float64, Int64, Spans, select

_LIMITS_BYTES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 256 * 2**20)
_BUCKETS = ("< 4 KiB", "4-64 KiB", "64 KiB-1 MiB", "1-16 MiB", "16-256 MiB", ">= 256 MiB")
_GATHERS = (Operation.PARAMS_ALL_GATHER, Operation.TP_ALL_GATHER)
_SCATTERS = (Operation.GRADS_REDUCE_SCATTER, Operation.TP_REDUCE_SCATTER)
_SUMS = (*AXIS_ALL_REDUCES, Operation.EMBEDDING_ALL_REDUCE)
_LINKS = (Operation.FORWARD_SEND, Operation.BACKWARD_SEND)
_KNOWN = (*_GATHERS, *_SCATTERS, *_SUMS, *_LINKS)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Exchanges of one kind of group, operation and size. Bandwidths in bytes per second. Medians unless noted."""

    group: str
    operation: str
    size: str
    num_ranks: int
    """Number of members of the largest group."""
    count: int
    median_bytes: int
    """Size of the whole vector."""
    transfer_s: float
    transfer_p90_s: float
    wait_s: float
    """Mean over the members of the time from the member's own start to the start of the last member."""
    algorithm_bandwidth: float
    bus_bandwidth: float
    bus_bandwidth_p10: float
    is_device_clock: bool


@dataclass(frozen=True, slots=True)
class Communication:
    """The communication in some steps."""

    steps: tuple[int, ...]
    num_ranks: int
    bandwidths: tuple[Bandwidth, ...]
    overlaps: tuple[Overlap, ...]
    exposed_percent: float
    """Percentage of the steps' time that was spent waiting for communication, without the bubble."""
    bubble_percent: float
    slow: SlowLinks
    num_exchanges: int
    num_incomplete: int
    """Exchanges without the span of a member, or without its end, so that their transfer time is not known."""
    num_too_short: int
    """Exchanges that ended before the last member began, because the clocks are not aligned well enough."""
    num_hidden: int
    """Exchanges timed by the CPU clock: no member that began before the last one waited for the end, so the transfer
    time is not known."""
    notes: tuple[str, ...]


def analyze_communication(events: StepEvents, first_step: int, last_step: int) -> Communication:
    """Return bandwidths, slow links and overlap of the full steps from `first_step` to `last_step`, inclusive."""
    spans = events.spans
    windows = step_windows(spans, events.totals, first_step, last_step)
    exchanges = find_exchanges(spans, events.roster)
    exposure = expose(spans, exchanges, windows)
    in_range = (exchanges.step >= first_step) & (exchanges.step <= last_step)
    is_known = in_range & is_any_of(exchanges.operation, _KNOWN)
    has_end, transfer_ns = transfer_times(spans, exchanges, exposure.exposed_ns - exposure.span_waiting_ns)
    is_ended = is_known & exchanges.is_whole & has_end
    is_timed = is_ended & (transfer_ns > 0)
    chosen = np.flatnonzero(is_timed)
    spent = exposure.spent_ns.sum(axis=0)
    total = max(1, int(spent.sum()))
    names = list(Category)
    exposed = sum(int(spent[names.index(category)]) for category in COMMUNICATION)
    notes = list(events.notes)
    notes += exchanges.problems()
    if not len(windows):
        notes.append("none of these steps was recorded span by span: communication is not known")
    return Communication(
        steps=tuple(np.unique(windows.step).tolist()),
        num_ranks=len(np.unique(windows.rank)),
        bandwidths=tuple(_bandwidths(spans, exchanges, chosen, transfer_ns)),
        overlaps=overlaps(spans, exposure),
        exposed_percent=100.0 * exposed / total,
        bubble_percent=100.0 * int(spent[names.index(Category.BUBBLE)]) / total,
        slow=find_slow_links(
            spans, exchanges, chosen, transfer_ns[chosen] / 1e9, classes_of(spans, exchanges, chosen), events.roster
        ),
        num_exchanges=int(is_known.sum()),
        num_incomplete=int((is_known & ~exchanges.is_whole).sum()),
        num_too_short=int((is_ended & (transfer_ns <= 0)).sum()),
        num_hidden=int((is_known & exchanges.is_whole & ~has_end).sum()),
        notes=tuple(notes),
    )


def transfer_times(spans: Spans, exchanges: Exchanges, held_up_ns: Int64) -> tuple[Flags, Int64]:
    """Return for each exchange whether its end is known, and the time from the latest start to the first known end.

    `held_up_ns`: for each span, how long the CPU thread only waited for it while its data was transferred. If the CPU
    clock times the work, the end of the member that began last is not known, unless all began at the same time.
    """
    if not len(exchanges):
        return np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64)
    parts = exchanges.parts
    latest_ns = np.repeat(exchanges.latest_start_ns, exchanges.num_parts)
    after_ns = end_ns(spans)[parts] - latest_ns
    is_of_device = (spans.flags[parts] & int(RecordFlag.DEVICE_CLOCK)) != 0
    is_earlier = spans.start_ns[parts] < latest_ns
    any_earlier = np.repeat(np.logical_or.reduceat(is_earlier, exchanges.first[:-1]), exchanges.num_parts)
    waits = has_known_end(select(spans, parts), held_up_ns[parts], after_ns)
    is_known = is_of_device | (waits & (is_earlier | ~any_earlier))
    first = np.minimum.reduceat(np.where(is_known, after_ns, np.iinfo(np.int64).max), exchanges.first[:-1])
    has_end: Flags = np.logical_or.reduceat(is_known, exchanges.first[:-1])
    return has_end, np.where(has_end, first, 0)


def whole_bytes(spans: Spans, exchanges: Exchanges, chosen: Int64) -> Int64:
    """Return the size of each exchange's whole vector: all shards for a gather, else the input of one member."""
    given = (
        np.maximum.reduceat(spans.num_bytes[exchanges.parts], exchanges.first[:-1])[chosen] if len(chosen) else chosen
    )
    is_gather = is_any_of(exchanges.operation[chosen], _GATHERS)
    sizes: Int64 = np.where(is_gather, given * exchanges.num_members[chosen], given)
    return sizes


def bus_factor(operation: int, num_ranks: int) -> float:
    """Return the part of the vector that each link carries, by nccl-tests' doc/PERFORMANCE.md."""
    if operation in [listed.number for listed in _SUMS]:
        return 2.0 * (num_ranks - 1) / num_ranks
    if operation in [listed.number for listed in (*_GATHERS, *_SCATTERS)]:
        return (num_ranks - 1) / num_ranks
    return 1.0


def classes_of(spans: Spans, exchanges: Exchanges, chosen: Int64) -> Int64:
    """Return a number for each exchange, equal for the same kind of group, operation and range of sizes."""
    names = {name: place for place, name in enumerate(sorted({group.name for group in exchanges.groups}))}
    of_group = np.array([names[group.name] for group in exchanges.groups], dtype=np.int64)
    size = np.digitize(whole_bytes(spans, exchanges, chosen), _LIMITS_BYTES)
    keys = np.stack([
        of_group[exchanges.group_of[chosen]],
        exchanges.operation[chosen].astype(np.int64),
        size.astype(np.int64),
    ], axis=1)  # fmt: skip
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64) if len(chosen) else chosen


def _bandwidths(spans: Spans, exchanges: Exchanges, chosen: Int64, transfer_ns: Int64) -> Sequence[Bandwidth]:
    if not len(chosen):
        return []
    sizes = exchanges.num_members[chosen]
    num_bytes = whole_bytes(spans, exchanges, chosen)
    waits = _mean_waits(spans, exchanges)[chosen]
    classes = classes_of(spans, exchanges, chosen)
    on_device = (spans.flags[exchanges.parts[exchanges.first[chosen]]] & int(RecordFlag.DEVICE_CLOCK)) != 0
    found = []
    for number in range(int(classes.max()) + 1):
        own = np.flatnonzero(classes == number)
        example = chosen[own[0]]
        seconds = transfer_ns[chosen[own]] / 1e9
        rates = num_bytes[own] / seconds
        factors = np.array([bus_factor(int(exchanges.operation[example]), size) for size in sizes[own].tolist()])
        found.append(
            Bandwidth(
                group=exchanges.groups[exchanges.group_of[example]].name,
                operation=operation_name(int(exchanges.operation[example])),
                size=_BUCKETS[int(np.digitize(num_bytes[own[0]], _LIMITS_BYTES))],
                num_ranks=int(sizes[own].max()),
                count=len(own),
                median_bytes=int(np.median(num_bytes[own])),
                transfer_s=float(np.median(seconds)),
                transfer_p90_s=float(np.percentile(seconds, 90)),
                wait_s=float(waits[own].mean() / 1e9),
                algorithm_bandwidth=float(np.median(rates)),
                bus_bandwidth=float(np.median(rates * factors)),
                bus_bandwidth_p10=float(np.percentile(rates * factors, 10)),
                is_device_clock=bool(on_device[own].all()),
            )
        )
    return sorted(found, key=lambda bandwidth: -bandwidth.transfer_s * bandwidth.count)


def _mean_waits(spans: Spans, exchanges: Exchanges) -> Float64:
    """Return for each exchange how long its members waited for the last member, on average. Units: ns."""
    waits = np.repeat(exchanges.latest_start_ns, exchanges.num_parts) - spans.start_ns[exchanges.parts]
    sums: Float64 = np.add.reduceat(waits, exchanges.first[:-1]) / exchanges.num_parts
    return sums
