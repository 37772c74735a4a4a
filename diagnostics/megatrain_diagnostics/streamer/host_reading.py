"""The current state of a host's streamer, as plain values for metrics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import starmap

import numpy as np

from megatrain import __version__
from megatrain.contracts.black_box.operations import MODEL_COMPUTES, OF_PRODUCERS, Operation, StepValue
from megatrain_diagnostics.events.tables import StepTotals, Values
from megatrain_diagnostics.metrics.readings import DevicesReading, HostReading, ProducerReading, RankReading
from megatrain_diagnostics.streamer.rank_tail import HostClock, RankTail
from megatrain_diagnostics.wire.sender import SenderState

_NS = 1_000_000_000
_COMPUTE = (*MODEL_COMPUTES, Operation.CLIP, Operation.OPTIMIZER)
_EXCHANGES = tuple(operation for operation in Operation if operation.is_collective or operation.is_point_to_point)

_CACHE_BYTES = {
    "hit": StepValue.CACHE_HIT_BYTES,
    "fetched": StepValue.CACHE_FETCHED_BYTES,
    "evicted": StepValue.CACHE_EVICTED_BYTES,
}


def rank_reading(tail: RankTail, clock: HostClock, gpu_uuid: str = "") -> RankReading:
    """Return the reading of one rank's box."""
    progress = tail.progress
    loader_starts = _value(tail.values, StepValue.LOADER_STARTS)
    records_reads, producers = loader_starts is not None, _producers(tail.values)
    cache_values = {kind: _value(tail.values, value) for kind, value in _CACHE_BYTES.items()}
    signs = (progress.phase_since_ns, progress.step_started_ns, progress.completed_ns)
    return RankReading(
        rank=tail.identity.rank,
        place=tail.identity.coordinate,
        gpu_uuid=gpu_uuid,
        step=progress.completed_step,
        last_step_unix_s=None if progress.completed_ns is None else _unix_s(progress.completed_ns, clock),
        last_sign_unix_s=_unix_s(max(sign for sign in signs if sign is not None), clock),
        step_s=None if progress.last_step_ns is None else progress.last_step_ns / _NS,
        compute_s=_sum_s(tail.totals, _COMPUTE),
        collective_s=_sum_s(tail.totals, _EXCHANGES),
        data_wait_s=_sum_s(tail.totals, (Operation.DATA_WAIT,)),
        gc_s=_sum_s(tail.totals, (Operation.GC,)),
        label_tokens=_value(tail.values, StepValue.LABEL_TOKENS),
        documents=_value(tail.values, StepValue.DOCUMENTS),
        squared_lengths=_value(tail.values, StepValue.SQUARED_LENGTHS),
        replaced_samples=_value(tail.values, StepValue.REPLACED_SAMPLES),
        steps_ready=_value(tail.values, StepValue.STEPS_READY),
        read_s=_sum_s(tail.totals, (Operation.DATA_READ,)) if records_reads else None,
        read_bytes=_read_bytes(tail.totals) if records_reads else None,
        loader_starts=loader_starts,
        picture_wait_s=_sum_s(tail.totals, (Operation.PICTURE_WAIT,)) if producers else None,
        producers=producers,
        cache_bytes={kind: int(value) for kind, value in cache_values.items() if value is not None},
        cache_not_stored=int(_value(tail.values, StepValue.CACHE_NOT_STORED) or 0),
    )


def host_reading(
    job: str,
    host: str,
    ranks: Sequence[RankReading],
    sender: SenderState,
    rows_sent: Mapping[str, int],
    num_lost: int,
    num_invalid: int,
    num_silent: int,
    devices: DevicesReading | None = None,
) -> HostReading:
    """Return the reading. `num_lost` and `num_invalid` count records; `dropped_rows` of `sender` counts rows."""
    steps = [rank.step_s for rank in ranks if rank.step_s is not None]
    return HostReading(
        job=job,
        host=host,
        version=__version__,
        ranks=tuple(ranks),
        median_step_s=statistics.median(steps) if steps else None,
        rows_sent=dict(rows_sent),
        rows_dropped={
            "overwritten": num_lost,
            "invalid": num_invalid,
            "spool-full": sender.outbox.dropped_rows,
        },
        spool_bytes=sender.outbox.spooled_bytes,
        is_connected=sender.is_connected,
        clock_offset_s=None if sender.clock is None else sender.clock.offset_ns / _NS,
        clock_error_s=None if sender.clock is None else sender.clock.error_ns / _NS,
        silent_ranks=num_silent,
        devices=devices,
    )


def _unix_s(monotonic_ns: int, clock: HostClock) -> float:
    return (monotonic_ns + clock.offset_ns) / _NS


def _sum_s(totals: StepTotals | None, operations: Sequence[Operation]) -> float | None:
    """Return the seconds of some operations in the last step; None before the first step."""
    if totals is None:
        return None
    chosen = np.isin(totals.operation, [operation.number for operation in operations])
    return float(totals.sum_ns[chosen].sum()) / _NS


def _read_bytes(totals: StepTotals | None) -> float | None:
    """Return the bytes that the data loader has read in the last step; None before the first step."""
    return None if totals is None else float(totals.num_bytes[totals.operation == Operation.DATA_READ.number].sum())


def _value(values: Values | None, kind: StepValue) -> float | None:
    """Return the newest value of a kind; None if the rank has recorded none."""
    found = _values(values, kind)
    return found[-1] if found else None


def _values(values: Values | None, kind: StepValue) -> list[float]:
    """Return all values of a kind in the last step that has any, in the order in which the rank recorded them."""
    return [] if values is None else values.value[values.kind == kind].tolist()


def _producers(values: Values | None) -> tuple[ProducerReading, ...]:
    """Return what each producer of pictures did in the last step with a read, as far as all its values are there."""
    return tuple(starmap(ProducerReading, zip(*(_values(values, kind) for kind in OF_PRODUCERS), strict=False)))
