"""The cost of an exchange that a step awaits at once: a latency, and a time in proportion to its bytes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.overlap_trace import OverlapTrace, ideal_of_calls, sent_bytes
from megatrain.contracts.black_box.values import Record

COST_COLUMNS = ("latency, ms", "rate in steps, MB/s", "ideal at that rate, ms", "ideal with latency too, ms")


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """The seconds of an exchange are latency_s + its bytes / rate. rate: bytes a second that a rank sends."""

    latency_s: float
    rate: float


def measured_cost(records: Sequence[Sequence[Record]], steps: set[int]) -> ExchangeCost | None:
    """Return the cost of the exchanges of these steps, which await each at once. records: by rank, of its black box.

    All ranks are one group. With overlap a span begins with the turn of its exchange, which may be under way before.
    An exchange takes as long as on the rank that begins last: the others also wait for that rank. The line through the
    median times of each number of bytes is the one with the least sum of squares, each weighted by its exchanges.
    None if there is no such line: all exchanges have one number of bytes, or its slope or latency is not positive.
    """
    size = len(records)
    seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
    num_bytes: dict[tuple[int, int], float] = {}
    for record in (record for of_rank in records for record in of_rank):
        if record.step in steps and record.collective_sequence and record.duration_ns is not None:
            key = record.group, record.collective_sequence
            seconds[key].append(record.duration_ns / 1e9)
            num_bytes[key] = sent_bytes(record.operation, record.num_bytes, size)
    by_bytes: dict[float, list[float]] = defaultdict(list)
    for key, found in seconds.items():
        if len(found) == size:
            by_bytes[num_bytes[key]].append(min(found))
    if len(by_bytes) < 2:
        return None
    medians = [statistics.median(found) for found in by_bytes.values()]
    weights = [len(found) ** 0.5 for found in by_bytes.values()]
    seconds_per_byte, latency_s = (float(one) for one in np.polyfit([*by_bytes], medians, 1, w=weights))
    if seconds_per_byte <= 0.0 or latency_s <= 0.0:
        return None
    return ExchangeCost(latency_s, 1.0 / seconds_per_byte)


def cost_columns(
    traces: Sequence[Sequence[OverlapTrace]], cost: ExchangeCost | None, num_steps: int
) -> dict[str, float | str]:
    """Return the cost, and the ideal times of a step with it; "-" without a cost.

    traces: by rank, its blocks of `num_steps` steps.
    """
    if cost is None:
        return dict.fromkeys(COST_COLUMNS, "-")
    ideals = [ideal_of_calls(traces, cost.rate, latency_s) / num_steps for latency_s in (0.0, cost.latency_s)]
    found = (cost.latency_s * 1e3, cost.rate / 1e6, *(seconds * 1e3 for seconds in ideals))
    return dict(zip(COST_COLUMNS, found, strict=True))
