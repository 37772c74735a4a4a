"""The kinds of schedule, one row each with all its facts; and closed forms for the idle time of a schedule and for the
activations that its stages hold, which need no schedule to be built.

Bubble: with free communication and model chunks of equal duration (tf forward, tb backward, any values), every stage
computes for num_microbatches * num_chunks * (tf + tb) and idles for (pp_size - 1) * (tf + tb), for any number of
micro-batches. If backward is split (ti for dgrad, tw for wgrad, any values) and wgrads fill the bubble, a stage idles
for (pp_size - 1) * (tf + ti - min(tf, ti, tw)). The factor is the paper's tf + ti - tw if wgrads are the shortest, and
else the longer of tf and ti. The bubble of a step does not depend on the number of micro-batches, so a batch 4 times as
large has a quarter of the bubble per token: 75 % less. For LAMB's larger batches, MegaScale sec. 3.1 states 87.5 %,
which this formula does not give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megatrain.contracts.errors import TopologyError
from megatrain.schedule.chunk_placement import ChunkPlacement
from megatrain.schedule.gpipe import gpipe, gpipe_in_flight
from megatrain.schedule.interleaved import interleaved, interleaved_in_flight
from megatrain.schedule.one_f_one_b import one_f_one_b, one_f_one_b_in_flight
from megatrain.schedule.order import EQUAL_DURATIONS, ComputeDurations, ComputeOrder
from megatrain.schedule.zero_bubble import zero_bubble, zero_bubble_idle, zero_bubble_in_flight

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
"""The names of the rows of KINDS, for the type checker; also the values of the option `parallel.schedule`."""


def _forward_and_backward(durations: ComputeDurations) -> float:
    return durations.total


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """The facts about a schedule that hold at any size."""

    name: ScheduleName
    summary: str
    """One sentence for the reference of the configuration."""
    generate: Callable[[ChunkPlacement, int], list[ComputeOrder]]
    """The compute order of each stage for a placement and a number of micro-batches."""
    in_flight: Callable[[ChunkPlacement, int], tuple[int, ...]]
    """The largest number of activations that each stage holds at once, in micro-batches of one chunk."""
    idle: Callable[[ComputeDurations], float] = _forward_and_backward
    """The idle time that each further stage adds to every stage, if communication takes no time."""
    has_chunks: bool = False
    """Whether a stage has several chunks; in the other schedules it has one."""
    is_v_shaped: bool = False
    """Whether every second pass of the chunks goes from the last stage to the first (chunk_placement.py)."""
    why_pipeline: str = ""
    """Why one stage is too few; empty if one is enough."""
    why_microbatches: str = ""
    """Why the schedule needs at least pp_size micro-batches; empty if any number is allowed."""
    splits_backward: bool = False
    """Whether wgrads are deferred."""

    def placement(self, pp_size: int, num_chunks: int) -> ChunkPlacement:
        return ChunkPlacement(pp_size, num_chunks, self.is_v_shaped)

    def least_microbatches(self, pp_size: int) -> int:
        """Return the fewest micro-batches that a pipeline of this schedule needs."""
        return pp_size if self.why_microbatches else 1


KINDS: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind("gpipe", "all forwards, then all backwards", gpipe, gpipe_in_flight),
        ScheduleKind("1f1b", "one forward, one backward", one_f_one_b, one_f_one_b_in_flight),
        ScheduleKind(
            "interleaved",
            "1f1b over num_chunks chunks a stage, with a bubble smaller by that factor",
            interleaved,
            interleaved_in_flight,
            has_chunks=True,
            why_microbatches="every change of chunk stalls the pipeline",
        ),
        ScheduleKind(
            "zero_bubble",
            "1f1b that defers wgrads to times when a stage would be idle: about a third of the bubble, and every "
            "stage has pp_size micro-batches in flight",
            zero_bubble,
            zero_bubble_in_flight,
            zero_bubble_idle,
            why_pipeline="fills the bubble of a pipeline",
            why_microbatches="there are too few wgrads to fill the bubble",
            splits_backward=True,
        ),
    )
}
SCHEDULE_NAMES = tuple(KINDS)
CHUNKED_NAMES = " or ".join(kind.name for kind in KINDS.values() if kind.has_chunks)
"""The names of the schedules with several chunks per stage, as text for messages."""


@dataclass(frozen=True, slots=True)
class Infeasibility:
    """Why a pipeline cannot be built: `text` has the rule and a hint, `keys` the keys of the configuration."""

    keys: tuple[str, ...]
    text: str


_SCHEDULE, _STAGES, _CHUNKS = "parallel.schedule", "parallel.pp_size", "parallel.num_chunks"


def layout_infeasibilities(name: str, pp_size: int, num_chunks: int) -> Iterator[Infeasibility]:
    """Yield the reasons why this pipeline cannot be built with any number of micro-batches."""
    if name not in KINDS:
        yield Infeasibility((_SCHEDULE,), f'{_SCHEDULE}="{name}" is not one of {", ".join(SCHEDULE_NAMES)}')
        return
    kind = KINDS[name]
    for key, value in ((_STAGES, pp_size), (_CHUNKS, num_chunks)):
        if value < 1:
            yield Infeasibility((key,), f"{key}={value} must be at least 1")
            return
    if num_chunks > 1 and not kind.has_chunks:
        yield Infeasibility(
            (_CHUNKS, _SCHEDULE),
            f'{_CHUNKS}={num_chunks} needs {_SCHEDULE}="{CHUNKED_NAMES}", found "{name}"; '
            f'use schedule="{CHUNKED_NAMES}" or num_chunks=1',
        )
    if num_chunks == 1 and kind.has_chunks:
        yield Infeasibility(
            (_SCHEDULE, _CHUNKS),
            f'{_SCHEDULE}="{name}" needs {_CHUNKS} of at least 2, found 1; use num_chunks=2 or schedule="1f1b"',
        )
    if pp_size == 1 and kind.why_pipeline:
        yield Infeasibility(
            (_SCHEDULE, _STAGES),
            f'{_SCHEDULE}="{name}" {kind.why_pipeline}, and {_STAGES}=1 has none; use schedule="1f1b" or pp_size=2',
        )


def infeasibility(
    name: str, pp_size: int, num_chunks: int, num_microbatches: int, batch_key: str = "batch.global_batch_size"
) -> str | None:
    """Return why this pipeline cannot be built, with the rule and a hint, or None if it can be built.

    batch_key: the key of the global batch size from which `num_microbatches` follows.
    """
    for found in layout_infeasibilities(name, pp_size, num_chunks):
        return found.text
    if num_microbatches < 1:
        return f"num_microbatches={num_microbatches} must be at least 1"
    kind = KINDS[name]
    if num_microbatches < kind.least_microbatches(pp_size):
        return (
            f"num_microbatches={num_microbatches} ({batch_key} / (batch.micro_batch_size * dp_size), "
            f'rounded up) must be at least {_STAGES}={pp_size} for {_SCHEDULE}="{name}", or {kind.why_microbatches}; '
            f'raise {batch_key} to {pp_size} micro-batches or use schedule="1f1b"'
        )
    return None


def require_feasible(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> ScheduleKind:
    """Return the kind. Raises: TopologyError with the rule and a hint when this pipeline cannot be built."""
    problem = infeasibility(name, pp_size, num_chunks, num_microbatches)
    if problem is not None:
        raise TopologyError(problem)
    return KINDS[name]


def nearest_schedule(name: ScheduleName, pp_size: int, num_chunks: int) -> ScheduleName:
    """Return `name` if this layout supports the schedule, else the first other schedule that the layout supports."""
    candidates: tuple[ScheduleName, ...] = (name, "1f1b", *(kind.name for kind in KINDS.values() if kind.has_chunks))
    return next(
        (candidate for candidate in candidates if not any(layout_infeasibilities(candidate, pp_size, num_chunks))), name
    )


def bubble_fraction(
    name: str,
    pp_size: int,
    num_chunks: int,
    num_microbatches: int,
    durations: ComputeDurations = EQUAL_DURATIONS,
) -> float:
    """Return the idle time of a stage in a step divided by its compute time, with free communication.

    The result is (pp_size - 1) / (chunks * micro-batches), for any durations. For zero_bubble, this value is multiplied
    by (tf + ti - min(tf, ti, tw)) / (tf + ti + tw).
    Raises: TopologyError when the pipeline cannot be built.
    """
    kind = require_feasible(name, pp_size, num_chunks, num_microbatches)
    return (pp_size - 1) * kind.idle(durations) / (num_chunks * num_microbatches * durations.total)


def in_flight_bound(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the largest number of activations that each stage holds at once, in micro-batches of one chunk.

    Raises: TopologyError when the pipeline cannot be built.
    """
    kind = require_feasible(name, pp_size, num_chunks, num_microbatches)
    return kind.in_flight(kind.placement(pp_size, num_chunks), num_microbatches)
