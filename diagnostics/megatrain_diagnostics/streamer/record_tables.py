"""Converts the records of a rank's ring to rows of the tables. Pure functions: no I/O and no clock.

The writing process may be broken: records with values that no rank can have measured are removed and counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.encoding import NO_VALUE
from megatrain.contracts.black_box.operations import MAX_OPERATIONS, Operation
from megatrain.contracts.black_box.values import RecordFlag
from megatrain_diagnostics.events.tables import NO_DURATION, Spans, StepTotals, Values
from megatrain_diagnostics.streamer.ring_tail import Records

_MAX_NUMBER = np.uint64(2**61)
"""All valid times, durations and numbers of bytes are smaller."""
_IS_RARE = np.zeros(MAX_OPERATIONS, dtype=bool)
"""By operation number: operations that are streamed in every step, because they are rare, long, and informative."""
for _operation in (
    *(Operation.GC, Operation.CHECKPOINT, Operation.CHECKPOINT_LOAD, Operation.EVALUATION, Operation.INIT),
):
    _IS_RARE[_operation.number] = True


@dataclass(frozen=True, slots=True)
class RecordSource:
    """The rank that wrote the records; `offset_ns` turns its times into unix ns."""

    round: int
    rank: int
    offset_ns: int


def kinds_of(records: Records) -> tuple[Records, Records, Records, int]:
    """Return the spans, the step totals, the values, and the number of invalid records."""
    flags = records["flags"]
    is_total, is_value = (flags & RecordFlag.STEP_TOTAL) != 0, (flags & RecordFlag.VALUE) != 0
    has_duration = (records["duration_ns"] < _MAX_NUMBER) | (records["duration_ns"] == NO_VALUE) | is_value
    is_sane = (records["start_ns"] < _MAX_NUMBER) & (records["launch_ns"] < _MAX_NUMBER)
    is_sane &= records["num_bytes"] < _MAX_NUMBER
    is_sane &= has_duration & (records["operation"] < MAX_OPERATIONS) & (records["step"] >= -1)
    is_span = ~is_total & ~is_value
    return (
        records[is_sane & is_span],
        records[is_sane & is_total & ~is_value],
        records[is_sane & is_value & ~is_total],
        int((~is_sane | (is_total & is_value)).sum()),
    )


def is_sampled(spans: Records, period: int) -> NDArray[np.bool_]:
    """Return the mask of the spans to stream in normal operation: spans of full steps, and rare operations.

    The gathers that a full step's forward waits for were started in the previous step, after the optimizer, so they are
    included.
    """
    step, operation, period = spans["step"], spans["operation"], max(1, period)
    is_used_by_full = (operation == Operation.PARAMS_ALL_GATHER.number) & ((step + 1) % period == 0)
    chosen: NDArray[np.bool_] = (step < 0) | (step % period == 0) | is_used_by_full | _IS_RARE[operation]
    return chosen


def spans_table(spans: Records, source: RecordSource) -> Spans:
    """Return the rows of spans; an open span has the duration -1."""
    duration = spans["duration_ns"].copy()
    is_open = duration == NO_VALUE
    duration[is_open] = 0
    duration_ns = duration.astype(np.int64)
    duration_ns[is_open] = NO_DURATION
    return Spans(
        round=_all(spans, source.round),
        rank=_all(spans, source.rank),
        sequence=spans["sequence"].astype(np.int64),
        step=spans["step"].astype(np.int32),
        operation=spans["operation"].astype(np.uint8),
        microbatch=spans["microbatch"].astype(np.int32),
        chunk=spans["chunk"].astype(np.int16),
        group=spans["group"].astype(np.int16),
        collective=spans["collective_sequence"].astype(np.int64),
        start_ns=_unix(spans["start_ns"], source),
        duration_ns=duration_ns,
        launch_ns=_unix(spans["launch_ns"], source),
        num_bytes=spans["num_bytes"].astype(np.int64),
        flags=spans["flags"].astype(np.int16),
    )


def totals_table(totals: Records, source: RecordSource) -> StepTotals:
    """Return the rows of STEP_TOTAL records: see contracts.black_box.values.StepTotal."""
    return StepTotals(
        round=_all(totals, source.round),
        rank=_all(totals, source.rank),
        sequence=totals["sequence"].astype(np.int64),
        step=totals["step"].astype(np.int32),
        operation=totals["operation"].astype(np.uint8),
        start_ns=_unix(totals["start_ns"], source),
        sum_ns=totals["duration_ns"].astype(np.int64),
        max_ns=totals["launch_ns"].astype(np.int64),
        count=totals["collective_sequence"].astype(np.int32),
        num_bytes=totals["num_bytes"].astype(np.int64),
    )


def values_table(values: Records, source: RecordSource) -> Values:
    """Return the rows of VALUE records: see contracts.black_box.values.RecordedValue."""
    return Values(
        round=_all(values, source.round),
        rank=_all(values, source.rank),
        sequence=values["sequence"].astype(np.int64),
        step=values["step"].astype(np.int32),
        kind=values["operation"].astype(np.uint8),
        at_ns=_unix(values["start_ns"], source),
        value=np.ascontiguousarray(values["duration_ns"]).view(np.float64),
    )


def _all(records: Records, value: int) -> NDArray[np.int32]:
    return np.full(len(records), value, dtype=np.int32)


def _unix(times: NDArray[np.uint64], source: RecordSource) -> NDArray[np.int64]:
    return times.astype(np.int64) + source.offset_ns
