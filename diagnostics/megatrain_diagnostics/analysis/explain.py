"""Divides the time of a step into compute, exposed communication, bubble, data and other time, adding up to 100 %.

For a step with all its spans the result is exact (exposure.py). For other steps only sums by operation are known, but
not the overlap, so communication, bubble and untimed work are one category, "not-split".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatrain.contracts.black_box.operations import MODEL_COMPUTES, Operation, operation_name
from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.exchanges import Exchanges, find_exchanges
from megatrain_diagnostics.analysis.exposure import CATEGORIES, Category, Exposure, expose
from megatrain_diagnostics.analysis.overlap import Overlap, overlaps
from megatrain_diagnostics.analysis.step_windows import StepEvents, step_windows
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.rows import is_any_of
from megatrain_diagnostics.events.tables import Int64, Spans, StepTotals, select

NOT_SPLIT = "not-split"
_MAX_LATE = 10
_LINKS = tuple(operation for operation in Operation if operation.is_point_to_point)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The division of the step time of some ranks. Units: ns, summed over the ranks."""

    name: str
    num_ranks: int
    wall_ns: int
    spent_ns: Mapping[str, int]
    """By category; the sum is `wall_ns`."""
    waiting_ns: Mapping[str, int]
    """By category: exposed communication before the last peer began. The bubble is all such time, and has no entry."""

    @property
    def percent(self) -> dict[str, float]:
        """Return the shares in percent with two decimals; they add up to exactly 100.00."""
        return shares(self.spent_ns)


@dataclass(frozen=True, slots=True)
class LastArrival:
    """The time that others waited for a rank that arrived last at their collectives."""

    rank: int
    host: str
    num_collectives: int
    waited_ns: int
    """Summed over the ranks that waited."""
    operation: str
    """The operation with the most waiting."""


@dataclass(frozen=True, slots=True)
class StepExplanation:
    """The division of the time of one step."""

    step: int
    is_full: bool
    """Whether its spans are known; if not, only its sums are."""
    wall_ns: int
    """Median over the ranks."""
    job: Breakdown
    stages: tuple[Breakdown, ...]
    ranks: tuple[Breakdown, ...]
    num_missing: int
    """Ranks of the layout for which the time of this step is not known."""
    last: tuple[LastArrival, ...]
    """The ranks that others waited for, the worst first."""
    overlaps: tuple[Overlap, ...]
    """Exposed and overlapped time of each kind of communication; empty if only sums are known."""
    overlaps_by_stage: tuple[tuple[Overlap, ...], ...]
    """The same as `overlaps` for each of `stages`."""
    notes: tuple[str, ...]


def explain_step(events: StepEvents, step: int) -> StepExplanation:
    """Return where the time of `step` went, from its spans if they are complete, else from its sums.

    Raises: DataError when there are no events of this step, or its duration is not known.
    """
    windows = step_windows(events.spans, events.totals, step, step)
    if len(windows):
        exchanges = find_exchanges(events.spans, events.roster)
        exposure = expose(events.spans, exchanges, windows)
        notes = list(events.notes)
        notes += exchanges.problems()
        ranks = [_of_window(exposure, place) for place in range(len(windows))]
        numbers = [int(rank) for rank in windows.rank]
        by_stage = tuple(
            overlaps(events.spans, exposure, of_stage) for of_stage in _ranks_by_stage(events.roster, numbers).values()
        )
        return replace(
            _explanation(events.roster, step, ranks, numbers, notes),
            is_full=True,
            last=last_arrivals(events.spans, exchanges, exposure, events.roster),
            overlaps=overlaps(events.spans, exposure),
            overlaps_by_stage=by_stage,
        )
    totals = select(events.totals, events.totals.step == step)
    if not len(totals.rank):
        raise DataError(f"step {step} is not among the events of round {events.roster.round}")
    notes = [*events.notes, f"step {step} was not recorded span by span: what overlapped is not known"]
    after = select(events.totals, events.totals.step == step + 1)
    numbers = sorted(set(totals.rank.tolist()))
    found = [_of_totals(rank, totals, after) for rank in numbers]
    whole = [(rank, breakdown) for rank, breakdown in zip(numbers, found, strict=True) if breakdown.wall_ns > 0]
    if not whole:
        raise DataError(
            f"step {step}: its duration is not known, because the operations step and data-wait are not recorded"
        )
    return _explanation(events.roster, step, [breakdown for _, breakdown in whole], [rank for rank, _ in whole], notes)


def _explanation(
    roster: Roster,
    step: int,
    found: Sequence[Breakdown],
    numbers: Sequence[int],
    notes: Iterable[str],
) -> StepExplanation:
    """Return the fields that do not need spans; the others are empty."""
    breakdowns = dict(zip(numbers, found, strict=True))
    return StepExplanation(
        step=step,
        is_full=False,
        wall_ns=int(np.median([breakdown.wall_ns for breakdown in found])),
        job=summed("job", found),
        stages=tuple(
            summed(f"stage {stage}", [breakdowns[rank] for rank in ranks])
            for stage, ranks in _ranks_by_stage(roster, numbers).items()
        ),
        ranks=tuple(found),
        num_missing=roster.layout.world_size - len(found),
        last=(),
        overlaps=(),
        overlaps_by_stage=(),
        notes=tuple(notes),
    )


def _ranks_by_stage(roster: Roster, ranks: Sequence[int]) -> dict[int, list[int]]:
    """Return stage -> its ranks, for stages with ranks, in the order of stages."""
    by_stage: dict[int, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: int(roster.stage_of[rank])):
        by_stage.setdefault(int(roster.stage_of[rank]), []).append(rank)
    return by_stage


def summed(name: str, parts: Sequence[Breakdown]) -> Breakdown:
    """Return the sum of some ranks' breakdowns."""
    names = list(dict.fromkeys(category for part in parts for category in part.spent_ns))
    waited = list(dict.fromkeys(category for part in parts for category in part.waiting_ns))
    return Breakdown(
        name=name,
        num_ranks=sum(part.num_ranks for part in parts),
        wall_ns=sum(part.wall_ns for part in parts),
        spent_ns={category: sum(part.spent_ns.get(category, 0) for part in parts) for category in names},
        waiting_ns={category: sum(part.waiting_ns.get(category, 0) for part in parts) for category in waited},
    )


def shares(amounts: Mapping[str, int]) -> dict[str, float]:
    """Return percentages with two decimals, rounded by largest remainder so that they add up to 100.00."""
    total = sum(amounts.values())
    if total <= 0:
        return dict.fromkeys(amounts, 0.0)
    hundredths = {name: amount * 10_000 // total for name, amount in amounts.items()}
    remainders = sorted(amounts, key=lambda name: amounts[name] * 10_000 % total, reverse=True)
    for name in remainders[: 10_000 - sum(hundredths.values())]:
        hundredths[name] += 1
    return {name: count / 100 for name, count in hundredths.items()}


def _of_window(exposure: Exposure, place: int) -> Breakdown:
    spent, waiting = exposure.spent_ns[place].tolist(), exposure.waiting_ns[place].tolist()
    named = dict(zip((category.value for category in CATEGORIES), spent, strict=True))
    return Breakdown(
        name=f"rank {int(exposure.windows.rank[place])}",
        num_ranks=1,
        wall_ns=sum(spent),
        spent_ns=named,
        waiting_ns={category.value: amount for category, amount in zip(CATEGORIES, waiting, strict=True) if amount},
    )


def _of_totals(rank: int, totals: StepTotals, after: StepTotals) -> Breakdown:
    """Return the breakdown from sums. `after`: sums of the next step, with the work between the two steps."""
    own, later = _sums(rank, totals), _sums(rank, after)
    step_ns = own.get(Operation.STEP.number, 0) + own.get(Operation.DATA_WAIT.number, 0)
    begin, end = totals.start_ns[totals.rank == rank], after.start_ns[after.rank == rank]
    between = max(0, int(end[0] - begin[0]) - step_ns) if len(begin) and len(end) else 0
    left = {"step": step_ns, "between": between}

    def taken(place: str, wanted_ns: int) -> int:
        """Take up to `wanted_ns` from the time that remains at `place`, and return the amount that was taken.

        Sums may overlap: evaluation also computes, and garbage collections in a step are reported with those after it.
        """
        amount = min(left[place], wanted_ns)
        left[place] -= amount
        return amount

    def of(*operations: Operation) -> int:
        return sum(own.get(operation.number, 0) for operation in operations)

    spent = {
        Category.DATA.value: taken("step", of(Operation.DATA_WAIT)),
        Category.COMPUTE.value: taken("step", of(*MODEL_COMPUTES)),
        Category.OPTIMIZER.value: taken("step", of(Operation.CLIP, Operation.OPTIMIZER)),
        Category.CHECKPOINT.value: taken("between", later.get(Operation.CHECKPOINT.number, 0)),
        Category.EVALUATION.value: taken("between", later.get(Operation.EVALUATION.number, 0)),
        Category.GC.value: taken("between", later.get(Operation.GC.number, 0)),
    }
    return Breakdown(f"rank {rank}", 1, step_ns + between, {**spent, NOT_SPLIT: sum(left.values())}, {})


def _sums(rank: int, totals: StepTotals) -> dict[int, int]:
    rows = np.flatnonzero(totals.rank == rank)
    return {int(totals.operation[row]): max(0, int(totals.sum_ns[row])) for row in rows}


def last_arrivals(spans: Spans, exchanges: Exchanges, exposure: Exposure, roster: Roster) -> tuple[LastArrival, ...]:
    """Return the ranks that others waited for in collectives, the worst first; only exposed waiting counts."""
    is_link = is_any_of(spans.operation, _LINKS)
    waited = np.flatnonzero((exposure.span_waiting_ns > 0) & (exchanges.exchange_of >= 0) & ~is_link)
    exchange = exchanges.exchange_of[waited]
    culprit = spans.rank[exchanges.last_part[exchange]]
    found = []
    for rank in np.unique(culprit).tolist():
        own = culprit == rank
        found.append(_arrival(rank, spans, waited[own], exchange[own], exposure.span_waiting_ns, roster))
    return tuple(sorted(found, key=lambda arrival: -arrival.waited_ns)[:_MAX_LATE])


def _arrival(rank: int, spans: Spans, rows: Int64, exchange: Int64, waiting_ns: Int64, roster: Roster) -> LastArrival:
    by_operation = {
        number: int(waiting_ns[rows[spans.operation[rows] == number]].sum())
        for number in np.unique(spans.operation[rows]).tolist()
    }
    worst = max(by_operation, key=lambda number: by_operation[number])
    return LastArrival(
        rank=rank,
        host=roster.host_of(rank),
        num_collectives=len(np.unique(exchange)),
        waited_ns=sum(by_operation.values()),
        operation=operation_name(worst),
    )
