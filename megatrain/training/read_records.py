"""The records of a rank about the reads of its batches, by the loader of its host or by its own thread (ADR 0084).

Each read is recorded once. For a read of the loader, the first rank of each replica of the host records it. Each rank
reads held-out samples itself, and waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic_ns

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain.data.producer_work import ProducerWorks, summed, waited_ns
from megatrain.data.reader import ReadSlots
from megatrain.data.step_batch import StepBatch
from megatrain.telemetry.recorder import Recorder


def record_reads(recorder: Recorder, batch: StepBatch) -> None:
    """Record the loader's reads that have ended since the previous batch, and all requests for pictures."""
    for read in () if batch.loader is None else batch.loader.reads:
        recorder.record_span(Operation.DATA_READ, read.start_ns, read.duration_ns, read.num_bytes)
    for works in _producers(batch):
        _record_requests(recorder, works)


def recorded_reads(recorder: Recorder, reads: Iterator[ReadSlots]) -> Iterator[ReadSlots]:
    """Yield the reads of held-out samples, and record each as a wait for data, with its requests for pictures."""
    while True:
        start_ns = monotonic_ns()
        read = next(reads, None)
        if read is None:
            return
        recorder.record_span(Operation.DATA_WAIT, start_ns, monotonic_ns() - start_ns)
        _record_requests(recorder, read.producers)
        yield read


def values_of_reads(batch: StepBatch) -> Iterator[tuple[StepValue, float]]:
    """Yield the step's values about its reads: those of the loader, then those of each producer of pictures."""
    if batch.loader is not None:
        yield StepValue.STEPS_READY, batch.loader.num_ready
        if batch.loader.num_starts is not None:
            yield StepValue.LOADER_STARTS, batch.loader.num_starts
    for work in summed(_producers(batch)):
        yield StepValue.PRODUCER_PICTURES, work.num_pictures
        yield StepValue.PRODUCER_ANSWER_SECONDS, work.answer_s
        yield StepValue.PRODUCER_WAITING, work.num_waiting
        yield StepValue.PRODUCER_FAILURES, work.num_failed


def _record_requests(recorder: Recorder, works: ProducerWorks) -> None:
    """Record the spans of the requests of a read for pictures."""
    start_ns, duration_ns = waited_ns(works)
    if duration_ns:
        recorder.record_span(Operation.PICTURE_WAIT, start_ns, duration_ns)
    for number, work in enumerate(works):
        if work.was_asked:
            recorder.record_span(
                Operation.PICTURE_REQUESTS, work.start_ns, work.duration_ns, work.num_bytes, chunk=number
            )


def _producers(batch: StepBatch) -> list[ProducerWorks]:
    """Return what producers of pictures did, for each read that this rank records."""
    reads = () if batch.loader is None else batch.loader.reads
    return [works for works in (*(read.producers for read in reads), batch.producers) if works]
