"""The timed operations and the values of a step that a rank records, with their numbers in the black box.

Names follow the public traces of "Understanding Stragglers in Large Model Training" (OSDI'25), so that megatrain's
tools can load those traces, and the tools of that work can load megatrain's. An assigned number is never changed or
reused, because old black boxes and event files must stay readable. New operations take the next free number, from 1 to
63: each has one bit in the 64-bit span mask.

A step also results in values, such as its loss. A rank writes them to its black box after the step: in the ring, a
value is a record with the flag VALUE whose operation is a StepValue and whose duration holds the 64 bits of a float.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import NUMBERING_AXES, first_axis_of


class Operation(StrEnum):
    """One kind of span. The value is the displayed name; `number` is its id in binary records and the span mask.

    The third item of a member is its kind, from which the other attributes follow: "host"; "compute", "collective" or
    "p2p" on the device; or "host-collective" for a collective that the host carries out.
    """

    number: int
    is_collective: bool
    """All ranks of a group take part, in the same order."""
    is_point_to_point: bool
    is_on_device: bool
    """It runs on the accelerator, so a device timer measures it: the host's clock would measure only the launch."""

    def __new__(cls, value: str, number: int, kind: str) -> Operation:
        member = str.__new__(cls, value)
        member._value_ = value
        member.number = number
        member.is_collective = kind in ("collective", "host-collective")
        member.is_point_to_point = kind == "p2p"
        member.is_on_device = kind not in ("host", "host-collective")
        return member

    STEP = "step", 1, "host"
    DATA_WAIT = "data-wait", 2, "host"
    FORWARD_COMPUTE = "forward-compute", 3, "compute"
    BACKWARD_COMPUTE = "backward-compute", 4, "compute"
    FORWARD_SEND = "forward-send", 5, "p2p"
    FORWARD_RECV = "forward-recv", 6, "p2p"
    BACKWARD_SEND = "backward-send", 7, "p2p"
    BACKWARD_RECV = "backward-recv", 8, "p2p"
    PARAMS_ALL_GATHER = "params-all-gather", 9, "collective"
    GRADS_REDUCE_SCATTER = "grads-reduce-scatter", 10, "collective"
    TP_ALL_GATHER = "tp-all-gather", 11, "collective"
    TP_REDUCE_SCATTER = "tp-reduce-scatter", 12, "collective"
    TP_ALL_REDUCE = "tp-all-reduce", 13, "collective"
    DP_ALL_REDUCE = "dp-all-reduce", 14, "collective"
    PP_ALL_REDUCE = "pp-all-reduce", 15, "collective"
    EMBEDDING_ALL_REDUCE = "embedding-all-reduce", 16, "collective"
    CLIP = "clip", 17, "compute"
    OPTIMIZER = "optimizer", 18, "compute"
    GC = "gc", 19, "host"
    CHECKPOINT = "checkpoint", 20, "host"
    CHECKPOINT_LOAD = "checkpoint-load", 21, "host"
    EVALUATION = "evaluation", 22, "host"
    INIT = "init", 23, "host"
    # A barrier is a collective that the host itself waits for, so the host's clock is the right one.
    BARRIER = "barrier", 24, "host-collective"
    CHECKPOINT_EXCHANGE = "checkpoint-exchange", 25, "host-collective"
    # The wgrad of a split backward; BACKWARD_COMPUTE is then its dgrad, which sends to other stages wait for.
    BACKWARD_WEIGHT_COMPUTE = "backward-weight-compute", 26, "compute"
    CHECKSUM = "checksum", 27, "host-collective"
    CP_ALL_REDUCE = "cp-all-reduce", 28, "collective"
    # Gathers the shards of each matrix on the rank that computes its update, and distributes the update.
    UPDATES_ALL_TO_ALL = "updates-all-to-all", 29, "collective"
    # The work of the data loader of the host, beside the ranks. The first rank of each replica of the host records it.
    DATA_READ = "data-read", 30, "host"
    # The part of a read that waits for pictures; and the requests of a read to one producer of pictures, whose number
    # is the chunk of the span.
    PICTURE_WAIT = "picture-wait", 31, "host"
    PICTURE_REQUESTS = "picture-requests", 32, "host"


OF_DATA_LOADER = (Operation.DATA_READ, Operation.PICTURE_WAIT, Operation.PICTURE_REQUESTS)
"""Work of other processes or threads for the batches of a rank, not of the rank itself."""

MODEL_COMPUTES = (Operation.FORWARD_COMPUTE, Operation.BACKWARD_COMPUTE, Operation.BACKWARD_WEIGHT_COMPUTE)
"""A rank's own computation on the micro-batches of a step."""

TP_COLLECTIVES = (Operation.TP_ALL_GATHER, Operation.TP_REDUCE_SCATTER, Operation.TP_ALL_REDUCE)
"""Collectives of tensor-parallel ranks: inside passes, except the all-reduces of the optimizer."""

REPLICA_COLLECTIVES = (Operation.GRADS_REDUCE_SCATTER, Operation.PARAMS_ALL_GATHER)
"""Exchanges of gradients and parameters in a replica group; several of them run at the same time."""

MAX_OPERATIONS = 64
"""All numbers are below this, because each has one bit in the span mask."""

_BY_NUMBER = {operation.number: operation for operation in Operation}
_BY_NAME = {operation.value: operation for operation in Operation}


def all_reduce_along(axis: str) -> Operation:
    """Return the operation that sums a small tensor along one of the axes that number the ranks.

    axis: the axis's name, or the name of a group along it: "tp-in-2", "dp-cp".
    Raises: TopologyError for an axis that does not number the ranks, because no operation sums along it.
    """
    operation = _BY_NAME.get(f"{first_axis_of(axis)}-all-reduce")
    if operation is None:
        known = ", ".join(one.value for one in Operation if one.value.endswith("-all-reduce"))
        raise TopologyError(
            f"no operation sums along {axis!r}; there are {known}: add one to Operation "
            "(megatrain/contracts/black_box/operations.py)"
        )
    return operation


AXIS_ALL_REDUCES = tuple(all_reduce_along(axis.name) for axis in NUMBERING_AXES)


def operation_name(number: int) -> str:
    """Return the name of an operation's number, or "operation-57" for one that a newer program has added."""
    operation = _BY_NUMBER.get(number)
    return f"operation-{number}" if operation is None else operation.value


class StepValue(IntEnum):
    """One kind of value. LABEL_TOKENS, SQUARED_LENGTHS, DEVICE_BYTES, DOCUMENTS, and those from REPLACED_SAMPLES on,
    differ by rank; the others are the same on all ranks with devices of one type."""

    LOSS = 1
    GRAD_NORM = 2
    TOKENS = 3
    """Tokens of the global batch."""
    LABEL_TOKENS = 4
    """Tokens of this rank's micro-batches that contribute to the loss."""
    SQUARED_LENGTHS = 5
    """The sum of squares of the documents' lengths in this rank's micro-batches: the cost of attention (OSDI'25)."""
    MODEL_FLOPS = 6
    """Model FLOPs of one rank's share of the step."""
    DEVICE_BYTES = 7
    """The device's peak memory use."""
    PEAK_FLOPS = 8
    """The device's peak FLOPs per second, if known. MODEL_FLOPS, the step's time and this give the MFU."""
    DOCUMENTS = 9
    """Documents of this rank's micro-batches; without a document mask the samples, because attention crosses all."""
    REPLACED_SAMPLES = 10
    """Samples of this rank that cannot be used and were replaced since its process began; only if the run replaces them
    (data.bad_samples)."""
    STEPS_READY = 11
    """Steps that the data loader of the host had ready when this rank requested the step; 0: the rank had to wait."""
    LOADER_STARTS = 12
    """How often a data loader was started on this host in this round; above 1: it was restarted."""
    # What producers of pictures did for the reads that this rank records: one value for each producer, in the order of
    # their addresses.
    PRODUCER_PICTURES = 13
    PRODUCER_ANSWER_SECONDS = 14
    """The mean time of an answered request; 0 without one."""
    PRODUCER_WAITING = 15
    """The most requests that already waited in the producer when a request of this rank's loader arrived."""
    PRODUCER_FAILURES = 16
    """Requests without an answer that could be used; they were sent again, to any producer."""
    CACHE_HIT_BYTES = 17
    """Bytes that reads of data in object storage got from the cache of the host. This value and the next three are sums
    since the data were opened in this round: over the rank's own reads, or over those of the host's data loader if
    there is one. The host's first rank then records them."""
    CACHE_FETCHED_BYTES = 18
    """Bytes that came from the object storage."""
    CACHE_EVICTED_BYTES = 19
    """Bytes that were removed from the cache to make room."""
    CACHE_NOT_STORED = 20
    """Blocks and whole files that could not be written to the cache, for example because the disk is full."""

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", "-")


OF_PRODUCERS = (
    StepValue.PRODUCER_PICTURES,
    StepValue.PRODUCER_ANSWER_SECONDS,
    StepValue.PRODUCER_WAITING,
    StepValue.PRODUCER_FAILURES,
)
"""A rank records one of each for each producer of pictures, in the order of the producers."""
