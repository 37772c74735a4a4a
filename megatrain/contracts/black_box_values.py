"""What a black box says, as values: whose it is, how far the rank has come, and its records.

All times are monotonic nanoseconds of the rank's host, which every process of that host shares until the next boot.
The bytes behind these are in black_box_layout.py, reading them is in black_box.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag

from megatrain.contracts.layout import Coordinate, Layout
from megatrain.contracts.operations import operation_name

ALL_OPERATIONS = 2**64 - 1
"""The span mask with every bit set, those of operations to come included."""


class Phase(IntEnum):
    """What the rank is busy with. A watcher's patience differs by phase."""

    INIT = 0
    FIRST_STEP = 1
    STEP = 2
    CHECKPOINT = 3
    EVALUATION = 4
    STOPPING = 5


class State(IntEnum):
    """How the writer left the file. RUNNING with no such process means that it was killed."""

    RUNNING = 0
    CLOSED = 1
    FAILED = 2


class Command(IntEnum):
    """What an executor may ask of a worker through the control page."""

    NONE = 0
    CHECKPOINT = 1
    """Take a checkpoint at the next step that all ranks agree on, and go on."""


class RecordFlag(IntFlag):
    """What else is known of a record."""

    NONE = 0
    FAILED = 1
    """The span ended by an exception."""
    DEVICE_CLOCK = 2
    """Start and duration are the accelerator's; until they are known the record is open and starts at its launch."""
    HOST_DONE = 4
    """The host has enqueued the work and gone on; only the accelerator's end is missing."""
    STEP_TOTAL = 8
    """Not a span but the sum of a step's spans of one operation: see StepTotal."""
    VALUE = 16
    """Not a span but a number that a step came to: see NotedValue."""
    WATCHED = 32
    """A thread of its own waited for the end from the start on: both are true, whoever else awaited the span."""


ATTENDED_SHIFT = 8
"""The bits of a record's flags from here on: the part of a span that its host spent on it. See `attended_bits`."""
ATTENDED_STEPS = 126
ATTENDED_MASK = 127

NO_SPAN = RecordFlag.STEP_TOTAL | RecordFlag.VALUE
"""Records with one of these are no spans."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose black box it is. Everything about diagnosis is keyed by job, branch and round.

    `round` is its number; `host` is the machine's name.
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
    """One moment on the monotonic clock (all times in the file) and on the wall clock, to turn one into the other.

    Units: `error_ns` is how long the pair took to read, the bound of its mismatch.
    """

    monotonic_ns: int
    unix_ns: int
    error_ns: int

    def unix_of(self, monotonic_ns: int) -> int:
        """Return the wall-clock time, in ns since 1970, of a monotonic time of the same host since the same boot."""
        return self.unix_ns + monotonic_ns - self.monotonic_ns


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the rank has come. Steps and their times are None before there is one. Monotonic ns.

    `median_step_ns` is the typical step, learned without the first one: what a hang watch multiplies.
    """

    phase: Phase
    phase_since_ns: int
    current_step: int | None
    step_started_ns: int | None
    completed_step: int | None
    completed_ns: int | None
    last_step_ns: int | None
    median_step_ns: int | None
    obeyed_command: int
    num_lost_ends: int
    awaited_group: int = 0
    """Number of the group whose operation the host waited for last, or waits for; 0: not said."""
    awaited_place: int = 0
    """Which of the group's operations: the wait is over when the group's `left` has come so far."""
    longest_checkpoint_ns: int | None = None
    """Of those taken between steps, and ended."""
    longest_evaluation_ns: int | None = None
    longest_write_ns: int | None = None
    """Of storing a snapshot, as its host reports it."""
    save_interval_ns: int | None = None
    """In force between two checkpoints that are taken by time; reported by the rank that reads the clock."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group of this rank: its ranks, and the last collective that this rank entered and left.

    The ranks are `first_rank + i * stride` for i < num_ranks, which every group of the 3D grid is; stride 0 says that
    they are not known. A pipeline link has two ranks, sender first, and an entry for each direction. Entries of two
    ranks with equal name and members are the same group. Sequence numbers count from 1 in each group, so the rank with
    the lowest `entered` of a stuck group is the one that the others wait for.
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
        """Return the members in the group's order, which may descend; none where the writer could not say them."""
        if self.stride == 0:
            return range(0)
        return range(self.first_rank, self.first_rank + self.num_ranks * self.stride, self.stride)


@dataclass(frozen=True, slots=True)
class ControlPage:
    """What the host's executor tells the worker.

    `command` is a number of `Command`; one that the worker does not know it leaves alone. `command_number` grows with
    each command and each number is obeyed once; command 0 is none. A step is streamed with all its spans when it is a
    multiple of `sample_period`, else only its sums. `lease_ok_until_ns` (monotonic) is 0 where no executor holds a
    lease for this worker; where the lease is gone it is the moment since when. `interval_ns` is what a round needs from
    step to step, `stop_ns` from the request to stop until its state is in storage, as all its hosts were told; 0: not
    said. `written_ns` is when the executor last wrote, 0 when none ever did.
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
    """One span. Times are monotonic ns; step (before the first), microbatch and chunk are -1 where there is none.

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
        """How long the host did nothing but launch and await what this span stands for; None: not said."""
        share = (int(self.flags) >> ATTENDED_SHIFT & ATTENDED_MASK) - 1
        return None if share < 0 or self.duration_ns is None else round(self.duration_ns * share / ATTENDED_STEPS)


def attended_bits(attended_ns: int, duration_ns: int) -> int:
    """Return the bits of a record's flags that say for how much of a span the host did nothing but launch and await it.

    To 1 in 126, rounded: the rest of the span it did something else.
    """
    share = round(ATTENDED_STEPS * min(attended_ns, duration_ns) / duration_ns) if duration_ns > 0 else ATTENDED_STEPS
    return (1 + share) << ATTENDED_SHIFT


@dataclass(frozen=True, slots=True)
class StepTotal:
    """All spans of one operation that ended in one step: what is streamed for every rank and step.

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
class NotedValue:
    """A number that a step came to. In the ring it is a record with VALUE: operation = kind, duration = its 64 bits.

    `kind_number` is that of a StepValue, or of one that a newer program has added; `value` may be infinite or NaN.
    """

    sequence: int
    step: int
    kind_number: int
    at_ns: int
    value: float
