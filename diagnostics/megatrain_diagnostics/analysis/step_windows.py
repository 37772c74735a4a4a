"""Finds the start and end of each rank's steps, and leaves out implausible events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import MODEL_COMPUTES, Operation
from megatrain.formatting import count_text, ranks_text
from megatrain_diagnostics.analysis.confirmed_steps import steps_of_several_ranks
from megatrain_diagnostics.analysis.exchanges import end_ns
from megatrain_diagnostics.analysis.window_pieces import Windows
from megatrain_diagnostics.events.clocks import align
from megatrain_diagnostics.events.roster import Roster, read_roster
from megatrain_diagnostics.events.rows import LOWER_32, earliest_at, is_any_of, pair_keys, positions_of
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import NO_DURATION, Clocks, Int64, Spans, StepTotals, select

_FARTHEST_NS = 3600 * 10**9
"""A span this far from the other spans of its step was timed by a clock that jumped."""
_MAX_NAMED = 12
_LAST_STEP = 2**31 - 1
_LONGEST_NS = 24 * 3600 * 10**9
OPERATIONS_OF_FULL_STEPS = (Operation.STEP, *MODEL_COMPUTES)
# operations of the step loop's thread; communication is not among them, because it may continue into the next step
_OF_THE_LOOP = (
    *(*OPERATIONS_OF_FULL_STEPS, Operation.DATA_WAIT, Operation.CLIP, Operation.OPTIMIZER, Operation.GC),
    *(Operation.CHECKPOINT, Operation.CHECKPOINT_LOAD, Operation.EVALUATION, Operation.BARRIER),
)


@dataclass(frozen=True, slots=True, eq=False)
class StepEvents:
    """Events of some steps of one round, by the daemon's clock."""

    roster: Roster
    spans: Spans
    totals: StepTotals
    notes: tuple[str, ...]
    """A sentence for each kind of rows that were left out."""


def read_step_events(
    source: EventSource,
    round_number: int,
    first_step: int | None,
    last_step: int | None,
    ranks: tuple[int, ...] | None = None,
) -> StepEvents:
    """Read spans and totals of steps, and of the step before and the step after, which may overlap with them.

    Raises: DataError for a round without ranks, and the errors of the source.
    """
    roster = read_roster(source, round_number)
    where = Where(
        rounds=(round_number,),
        first_step=None if first_step is None else first_step - 1,
        last_step=None if last_step is None else last_step + 1,
        ranks=ranks,
    )
    spans, notes = plausible_spans(source, roster, source.read(Spans, where))
    totals = align(source.read(StepTotals, where), source.read(Clocks), roster.hosts)
    is_known = (totals.rank >= 0) & (totals.rank < roster.layout.world_size)
    return StepEvents(roster, spans, select(totals, is_known), notes)


def plausible_spans(source: EventSource, roster: Roster, spans: Spans) -> tuple[Spans, tuple[str, ...]]:
    """Return the plausible spans, by the daemon's clock, and sentences about the spans that were left out."""
    return _fit(align(spans, source.read(Clocks), roster.hosts), roster)


def _fit(spans: Spans, roster: Roster) -> tuple[Spans, tuple[str, ...]]:
    """Return the plausible rows, and sentences about the rows that were left out."""
    notes: list[str] = []
    is_known = (spans.rank >= 0) & (spans.rank < roster.layout.world_size)
    is_known &= (spans.duration_ns >= NO_DURATION) & (spans.duration_ns < _LONGEST_NS)
    if not is_known.all():
        num_left_out = count_text(int((~is_known).sum()), "span")
        notes.append(f"left out {num_left_out} of ranks outside the layout or of impossible duration")
        spans = select(spans, is_known)
    steps, of_step = np.unique(spans.step, return_inverse=True)
    of_step = of_step.reshape(-1)
    order = np.lexsort((spans.start_ns, of_step))
    first = np.searchsorted(of_step[order], np.arange(len(steps)))
    counts = np.diff(np.concatenate((first, [len(order)])))
    middle = spans.start_ns[order[first + counts // 2]] if len(steps) else np.zeros(0, dtype=np.int64)
    # step -1 contains everything before the first step
    is_near = (np.abs(spans.start_ns - middle[of_step]) < _FARTHEST_NS) | (spans.step < 0)
    if not is_near.all():
        notes.append(
            f"left out {count_text(int((~is_near).sum()), 'span')} more than an hour away from the rest of the step: "
            f"the clock of {ranks_text(spans.rank[~is_near].tolist(), _MAX_NAMED)} jumped"
        )
        spans = select(spans, is_near)
    return spans, tuple(notes)


def known_steps(source: EventSource, round_number: int) -> str:
    """Return a text that lists the steps with all spans and the steps with sums."""
    where = Where(rounds=(round_number,), operations=(Operation.STEP.number,))
    full, summed = (
        full_steps(source.read(Spans, where)).tolist(),
        np.unique(source.read(StepTotals, where).step).tolist(),
    )
    parts = []
    for what, steps in (("all spans of", full), ("sums of", summed)):
        shown = ", ".join(map(str, steps[-_MAX_NAMED:]))
        parts.append(f"{what} steps {'..., ' if len(steps) > _MAX_NAMED else ''}{shown}" if steps else f"{what} none")
    return "; ".join(parts)


def spans_of_full_steps(round_number: int, first_step: int | None = None, last_step: int | None = None) -> Where:
    """Return the choice of the spans that show which steps were recorded in full: few spans of each step."""
    operations = tuple(operation.number for operation in OPERATIONS_OF_FULL_STEPS)
    return Where((round_number,), first_step, last_step, operations=operations)


def full_steps(spans: Spans) -> Int64:
    """Return the steps that some rank recorded in full, ascending."""
    return np.unique(_full_rank_steps(spans) & LOWER_32)


def newest_steps(spans: Spans, count: int) -> Int64:
    """Return the newest steps that were recorded in full, ascending.

    If several ranks report some steps, steps that only one rank reports are dropped as an error of that rank.
    """
    return steps_of_several_ranks(_full_rank_steps(spans) & LOWER_32)[-count:]


def _full_rank_steps(spans: Spans, first_step: int = 0, last_step: int = _LAST_STEP) -> Int64:
    """Return the `pair_keys` of rank and step for the steps that ranks recorded in full, ascending."""
    is_full = is_any_of(spans.operation, OPERATIONS_OF_FULL_STEPS) & (spans.duration_ns >= 0)
    is_full &= (spans.step >= max(0, first_step)) & (spans.step <= last_step)
    return np.unique(pair_keys(spans.rank[is_full], spans.step[is_full]))


def step_windows(spans: Spans, totals: StepTotals, first_step: int, last_step: int) -> Windows:
    """Return the windows of the steps that ranks recorded in full: from the start of a step to the start of the next.

    If the start of the next step is not known, the window ends with the last operation of the step loop's thread.
    """
    keys = _full_rank_steps(spans, first_step, last_step)
    of_loop = select(spans, is_any_of(spans.operation, _OF_THE_LOOP) & (spans.step >= 0))
    earliest, latest = _extent(of_loop, keys)
    begin, end = _starts(totals, keys, earliest), _starts(totals, keys + 1, latest)
    rank, step = (keys >> 32).astype(np.int32), (keys & LOWER_32).astype(np.int32)
    order = np.lexsort((begin, rank))
    rank, step, begin, end = rank[order], step[order], begin[order], end[order]
    # windows of one rank do not overlap
    same_rank = rank[1:] == rank[:-1]
    end[:-1] = np.where(same_rank, np.minimum(end[:-1], begin[1:]), end[:-1])
    is_fit = (end > begin) & (end - begin < _LONGEST_NS)
    return Windows(rank[is_fit], step[is_fit], begin[is_fit], end[is_fit])


def _starts(totals: StepTotals, wanted: Int64, otherwise_ns: Int64) -> Int64:
    """Return the start of each wanted rank and step, by `pair_keys`; if it is not known, `otherwise_ns`."""
    keys, first = np.unique(pair_keys(totals.rank, totals.step), return_index=True)
    position = positions_of(wanted, keys)
    starts_ns = otherwise_ns.copy()
    is_known = position >= 0
    starts_ns[is_known] = totals.start_ns[first[position[is_known]]]
    return starts_ns


def _extent(spans: Spans, keys: Int64) -> tuple[Int64, Int64]:
    """Return the start of the first span and the end of the last span of each rank and step, by `pair_keys`."""
    position = positions_of(pair_keys(spans.rank, spans.step), keys)
    is_known = position >= 0
    earliest = earliest_at(len(keys), position[is_known], spans.start_ns[is_known])
    latest = np.full(len(keys), np.iinfo(np.int64).min)
    np.maximum.at(latest, position[is_known], end_ns(spans)[is_known])
    return earliest, latest
