"""Finds the operations whose time changed when the level of the step time changed.

A rank that computes longer makes all others wait in their collectives, so the victims have the longest sums. Therefore
own work is measured on the rank where it grew the most, and communication on the member of each group where it grew the
least. Own work is considered first as the cause, then collectives, then the links of the pipeline. If none of them
explains the change, ranks may begin at different times (MegaScale sec. 5.1: irregular garbage collection and slow
operators), which launch_stagger.py measures. Operations whose end the host detects late are left out: sends, and the
small all-reduces of counts and norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import MODEL_COMPUTES, REPLICA_COLLECTIVES, TP_COLLECTIVES, Operation
from megatrain.contracts.layout import REPLICAS, STAGES, Layout
from megatrain_diagnostics.events.roster import Roster, places_along
from megatrain_diagnostics.events.tables import Float64, Int64, StepTotals

EXPLAINS = 0.4
"""An operation that explains at least this fraction of the change of the step time is its cause."""
COMPUTE = "forward-compute and backward-compute"
"""The name of both operations together, used if no single operation of a rank's own work explains a change."""
_OWN_WORK = (*MODEL_COMPUTES, Operation.DATA_WAIT, Operation.GC, Operation.OPTIMIZER)
_OF_PP = (Operation.FORWARD_RECV, Operation.BACKWARD_RECV, Operation.EMBEDDING_ALL_REDUCE)
_AXIS_OF: Mapping[Operation, str] = {
    **dict.fromkeys(TP_COLLECTIVES, "tp"),
    **dict.fromkeys(REPLICA_COLLECTIVES, REPLICAS[0]),
    **dict.fromkeys(_OF_PP, STAGES),
}
"""The axis of each exchange; parameters and gradients are exchanged along all axes of their replica group."""
_MAX_HOSTS = 16


@dataclass(frozen=True, slots=True)
class Moved:
    """An operation whose time changed. Units: s per step."""

    operation: str
    before_s: float
    after_s: float
    explained: float
    """Fraction of the change of the step time."""
    ranks: tuple[int, ...]
    """Ranks whose time changed by at least half of the largest change."""
    hosts: tuple[str, ...]

    @property
    def delta_s(self) -> float:
        return self.after_s - self.before_s


def moved_operations(before: StepTotals, after: StepTotals, roster: Roster, delta_s: float) -> tuple[Moved, ...]:
    """Return the operations whose time changed together with the step time, the likeliest cause first.

    Units: `delta_s` is the change of the step time in s, negative if steps became shorter.
    """
    world_size = roster.layout.world_size
    sums = {
        operation: (_rank_medians(before, operation, world_size), _rank_medians(after, operation, world_size))
        for operation in (*_OWN_WORK, *_AXIS_OF)
    }
    changes = {operation: new - old for operation, (old, new) in sums.items()}
    for operation in changes:
        if operation in _AXIS_OF:
            changes[operation] = _of_groups(changes[operation], groups_of(operation, roster.layout), delta_s)
    _take_tp_out(changes)
    found = [
        (_order(operation), _moved(operation.value, sums[operation][0], change, roster, delta_s))
        for operation, change in changes.items()
        if np.isfinite(change).any()
    ]
    both = _sum([changes[operation] for operation in MODEL_COMPUTES])
    if np.isfinite(both).any() and all(moved.explained < EXPLAINS for order, moved in found if order == 0):
        # a slower device makes both passes longer
        found.append(
            (0, _moved(COMPUTE, _sum([sums[operation][0] for operation in MODEL_COMPUTES]), both, roster, delta_s))
        )
    likely = sorted(
        (entry for entry in found if entry[1].explained > 0.05),
        key=lambda entry: (
            entry[1].explained < EXPLAINS,
            entry[0] if entry[1].explained >= EXPLAINS else 0,
            -entry[1].explained,
        ),
    )
    return tuple(moved for _, moved in likely)


def _take_tp_out(changes: dict[Operation, Float64]) -> None:
    """Subtract the tp collectives, which lie inside compute, from the change of compute."""
    of_tp = sum(np.nan_to_num(changes[operation]) for operation in TP_COLLECTIVES)
    total = sum(np.nan_to_num(changes[operation]) for operation in MODEL_COMPUTES)
    for operation in MODEL_COMPUTES:
        change = changes[operation]
        share = np.divide(np.nan_to_num(change), total, out=np.zeros(len(change)), where=np.abs(total) > 0)
        changes[operation] = change - np.clip(share, 0.0, 1.0) * of_tp


def _sum(of_operations: Sequence[Float64]) -> Float64:
    summed: Float64 = np.sum(of_operations, axis=0)
    return summed


def _order(operation: Operation) -> int:
    """Return the order in which operations are considered as causes: own work, collectives, pipeline links."""
    return 0 if operation in _OWN_WORK else 1 if operation not in _OF_PP else 2


def _rank_medians(totals: StepTotals, operation: Operation, world_size: int) -> Float64:
    """Return the median (for GC the mean) of each rank's sums per step, in s; NaN for ranks without rows.

    A step without the operation counts as 0.
    """
    ranks = np.unique(totals.rank)
    steps = np.unique(totals.step)
    found = np.full(world_size, np.nan)
    if not len(ranks):
        return found
    sums = np.zeros((len(ranks), len(steps)))
    rows = totals.operation == operation.number
    np.add.at(
        sums,
        (np.searchsorted(ranks, totals.rank[rows]), np.searchsorted(steps, totals.step[rows])),
        totals.sum_ns[rows] / 1e9,
    )
    # garbage collection does not occur in every step, so its median would be 0
    found[ranks] = sums.mean(axis=1) if operation is Operation.GC else np.median(sums, axis=1)
    return found


def groups_of(operation: Operation, layout: Layout) -> Int64:
    """Return a number for each rank; ranks in the same group of this exchange have the same number.

    Raises: KeyError for an operation that is not in the table of exchanges.
    """
    axis = _AXIS_OF[operation]
    axes = layout.replica_axes(axis) if axis in REPLICAS else (axis,)
    first: Int64 = np.arange(layout.world_size)
    for one in axes:
        first = first - places_along(layout, one) * layout.stride(one)
    return first


def _of_groups(change: Float64, groups: Int64, delta_s: float) -> Float64:
    """Return for each rank the least change among the members of its group, in the direction of `delta_s`."""
    sign = 1.0 if delta_s >= 0 else -1.0
    least = np.full(int(groups.max()) + 1, np.inf)
    known = np.isfinite(change)
    np.minimum.at(least, groups[known], sign * change[known])
    of_rank = least[groups]
    result: Float64 = np.where(np.isfinite(of_rank), sign * of_rank, np.nan)
    return result


def _moved(name: str, old: Float64, change: Float64, roster: Roster, delta_s: float) -> Moved:
    sign = 1.0 if delta_s >= 0 else -1.0
    along = np.where(np.isfinite(change), sign * change, -np.inf)
    worst = int(np.argmax(along))
    most = float(along[worst])
    ranks = np.flatnonzero(along >= 0.5 * most) if most > 0 else np.zeros(0, dtype=np.int64)
    return Moved(
        operation=name,
        before_s=float(old[worst]),
        after_s=float(old[worst] + change[worst]),
        explained=max(0.0, most / abs(delta_s)) if delta_s else 0.0,
        ranks=tuple(ranks.tolist()),
        hosts=roster.hosts_of(ranks.tolist())[:_MAX_HOSTS],
    )
