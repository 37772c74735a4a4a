"""The content of a black box as values: the rank's identity, progress and records.

All times are monotonic nanoseconds of the rank's host; all processes of that host share this clock until the next boot.
A pair of readings of the monotonic and the wall clock converts them. encoding.py defines the bytes; reader.py reads
them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from megatrain.contracts.black_box.operations import operation_name
from megatrain.contracts.layout import Coordinate, Layout

ALL_OPERATIONS = 2**64 - 1
"""The span mask with every bit set, including the bits of future operations."""

_NUM_READINGS = 5


class Phase(IntEnum):
    """What the rank is doing. A watcher's time limits differ by phase."""

    INIT = 0
    FIRST_STEP = 1
    STEP = 2
    CHECKPOINT = 3
    EVALUATION = 4
    STOPPING = 5


class State(IntEnum):
    """How the writer left the file. RUNNING without a live process means that the rank was killed."""

    RUNNING = 0
    CLOSED = 1
    FAILED = 2


class Command(IntEnum):
    """What an executor may request from a worker through the control page."""

    NONE = 0
    CHECKPOINT = 1
    """Take a checkpoint at the next step that all ranks agree on, and continue."""


class RecordFlag(IntFlag):
    """Further properties of a record."""

    NONE = 0
    FAILED = 1
    """The span ended with an exception."""
    DEVICE_CLOCK = 2
    """Start and duration are accelerator times. Until these are known, the record is open and starts at its launch."""
    HOST_DONE = 4
    """The host has enqueued the work and continued; only the end on the accelerator is missing."""
    STEP_TOTAL = 8
    """Not a span but the sum of a step's spans of one operation; see StepTotal."""
    VALUE = 16
    """Not a span but a result of a step, such as the loss; see RecordedValue."""
    WATCHED = 32
    """A separate thread waited for the end from the start on, so both times are exact, even if the host waited late."""
    DEVICE_BEGUN = 64
    """The accelerator has begun the work. Set only for unfinished spans; see Progress.device_seen_ns."""
    DEVICE_AWAITED = 128
    """The accelerator's computation has reached the wait for this exchange. Set only for unfinished spans, as
    DEVICE_BEGUN is."""


ATTENDED_SHIFT = 8
"""Position of the first of the flag bits that hold the attended part of a span: see `attended_bits`."""
ATTENDED_STEPS = 126
ATTENDED_MASK = 127

NO_SPAN = RecordFlag.STEP_TOTAL | RecordFlag.VALUE
"""Records with one of these flags are not spans."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The rank and round of a black box. All diagnosis is keyed by job, branch and round.

    `round` is the round's number; `host` is the machine's name.
    """

    job: str
    branch: str
    round: int
    rank: int
    layout: Layout
    pid: int
    host: str

    @property
    def coordinate(self) -> Coordinate:
        return self.layout.coordinate(self.rank)


@dataclass(frozen=True, slots=True)
class ClockBase:
    """The same moment on the monotonic clock (all times in the file) and on the wall clock, to convert between them.

    `error_ns` is the time it took to read the pair, which bounds the mismatch.
    """

    monotonic_ns: int
    unix_ns: int
    error_ns: int

    def unix_of(self, monotonic_ns: int) -> int:
        """Return the wall-clock time, in ns since 1970, of a monotonic time of the same host since the same boot."""
        return self.unix_ns + monotonic_ns - self.monotonic_ns


@dataclass(frozen=True, slots=True)
class Progress:
    """The rank's progress. Steps and their times are None before the first step. Times are monotonic ns.

    `median_step_ns` is the typical time of a step with as much work as the present one; the first step of the process
    is not measured. Hang detection uses a multiple of this time.
    """

    phase: Phase
    phase_since_ns: int
    current_step: int | None
    step_started_ns: int | None
    completed_step: int | None
    completed_ns: int | None
    last_step_ns: int | None
    median_step_ns: int | None
    completed_command: int
    num_lost_ends: int
    awaited_group: int = 0
    """Number of the group of the operation that the host waits for, or last waited for; 0: no value."""
    awaited_place: int = 0
    """The sequence number of that operation. The wait is over when the group's `left` reaches this number."""
    longest_checkpoint_ns: int | None = None
    """The longest completed checkpoint between steps."""
    longest_evaluation_ns: int | None = None
    longest_write_ns: int | None = None
    """The longest write of a snapshot to storage, as the host reports it."""
    save_interval_ns: int | None = None
    """The current interval between checkpoints by time; the rank that reads the clock reports it."""
    device_seen_ns: int | None = None
    """When the accelerator's position was last read. DEVICE_BEGUN and DEVICE_AWAITED apply to that time."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A process group of this rank: its ranks, and the last collectives that this rank entered and left.

    The ranks are `first_rank + i * stride` for i < num_ranks; every group along an axis of the mesh has this form.
    Stride 0 means that the ranks are unknown. A pipeline link has two ranks, sender first, and an entry for each
    direction. Entries of two ranks with equal name and members are the same group. Sequence numbers count from 1 in
    each group. So in a stuck group, the others wait for the rank with the lowest `entered`.
    """

    number: int
    name: str
    first_rank: int
    stride: int
    num_ranks: int
    entered: int = 0
    left: int = 0

    @property
    def ranks(self) -> range:
        """The ranks in the group's order, which may descend; empty if they are unknown."""
        if self.stride == 0:
            return range(0)
        return range(self.first_rank, self.first_rank + self.num_ranks * self.stride, self.stride)


@dataclass(frozen=True, slots=True)
class ControlPage:
    """The executor's message to a worker of its host.

    `command` is a number of `Command`; a worker ignores unknown numbers. `command_number` grows with each command, and
    a worker executes each number once; command 0 is none. A step is streamed with all its spans when it is a multiple
    of `sample_period`, else only with its totals. `lease_ok_until_ns` (monotonic) is 0 when no executor holds a lease
    for this worker; after the lease is lost, it is the time of the loss. `interval_ns` is the time that a round needs
    from step to step. `stop_ns` is the time from the request to stop until the round's state is in storage. All hosts
    of the round receive the same two values; 0 means no value. `written_ns` is the time of the executor's last write, 0
    before the first.
    """

    command_number: int = 0
    command: int = 0
    interval_ns: int = 0
    span_mask: int = ALL_OPERATIONS
    sample_period: int = 1
    lease_ok_until_ns: int = 0
    round: int = 0
    written_ns: int = 0
    stop_ns: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One span. Times are monotonic ns. `step`, `microbatch` and `chunk` are -1 if there is none.

    `collective_sequence` counts the spans of the group, modulo 2**32; 0 without a group.
    """

    sequence: int
    start_ns: int
    duration_ns: int | None
    launch_ns: int
    num_bytes: int
    step: int
    collective_sequence: int
    microbatch: int
    chunk: int
    operation_number: int
    group: int
    flags: RecordFlag

    @property
    def operation(self) -> str:
        return operation_name(self.operation_number)

    @property
    def is_span(self) -> bool:
        return not self.flags & NO_SPAN

    @property
    def is_in_flight(self) -> bool:
        return self.duration_ns is None

    @property
    def attended_ns(self) -> int | None:
        """How long the host only launched this span's work and waited for it; None: no value.

        With DEVICE_CLOCK: how long the computation on the accelerator waited for it.
        """
        share = (int(self.flags) >> ATTENDED_SHIFT & ATTENDED_MASK) - 1
        return None if share < 0 or self.duration_ns is None else round(self.duration_ns * share / ATTENDED_STEPS)


def attended_bits(attended_ns: int, duration_ns: int) -> int:
    """Return flag bits for the attended part of a span (`Record.attended_ns`).

    The resolution is 1/126 of the span, rounded. In the rest of the span the host, or the accelerator, did something
    else.
    """
    share = round(ATTENDED_STEPS * min(attended_ns, duration_ns) / duration_ns) if duration_ns > 0 else ATTENDED_STEPS
    return (1 + share) << ATTENDED_SHIFT


@dataclass(frozen=True, slots=True)
class StepTotal:
    """The sum of all spans of one operation that ended in one step. It is streamed for every rank and step.

    In the ring it is a record with STEP_TOTAL: duration = sum, launch = longest, collective_sequence = count.
    """

    sequence: int
    step: int
    step_started_ns: int
    operation_number: int
    sum_ns: int
    max_ns: int
    count: int
    num_bytes: int

    @property
    def operation(self) -> str:
        return operation_name(self.operation_number)


@dataclass(frozen=True, slots=True)
class RecordedValue:
    """A result of a step, such as the loss. In the ring: a record with VALUE, operation = kind, duration = its 64 bits.

    `kind_number` is the number of a StepValue, possibly one that a newer program has added. `value` may be infinite or
    NaN.
    """

    sequence: int
    step: int
    kind_number: int
    at_ns: int
    value: float


def read_clock_base() -> ClockBase:
    """Read both clocks together. Returns the closest of several pairs, because a preemption may separate two reads."""
    readings: list[ClockBase] = []
    for _ in range(_NUM_READINGS):
        before, unix_ns, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append(ClockBase((before + after) // 2, unix_ns, after - before))
    return min(readings, key=lambda reading: reading.error_ns)
