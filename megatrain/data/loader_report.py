"""What the data loader of a host did for a rank. The rank records it with its own telemetry."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.data.producer_work import ProducerWorks


@dataclass(frozen=True, slots=True)
class LoaderRead:
    """One read of a replica's part of a step.

    start_ns: by time.monotonic_ns, which is one clock for all processes of a host. num_bytes: of the arrays of tokens,
    labels, documents and patches in the ring. producers: what each producer of pictures did for the read.
    """

    start_ns: int
    duration_ns: int
    num_bytes: int
    producers: ProducerWorks = ()


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """The state of the loader when a rank got a batch.

    num_ready: the steps for this rank that the ring had when the rank requested the batch; with 0 it had to wait.
    reads: the reads that have ended since the previous batch. num_starts: how often a loader was started in this round.
    Only the first rank of each replica of the host has these two; on the others they are () and None.
    """

    num_ready: int
    reads: tuple[LoaderRead, ...] = ()
    num_starts: int | None = None
