"""Decide what a host's writer does next. Pure functions from slots and plans to decisions with their reasons.

A snapshot is due when the slots of all ranks of this host have it and it waits to be written. A snapshot that can never
become due, or for which no process waits any more, is given up, because its slots cannot be reused before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatrain.arena.plans import HostPlan
from megatrain.arena.sealed import SealedSlot
from megatrain.arena.slot_layout import Persist, SealedSnapshot
from megatrain.checkpoint.write_marks import WritingMark
from megatrain.formatting import ranks_text


@dataclass(frozen=True, slots=True)
class DueSnapshot:
    """A snapshot to store. `slots` are those of the ranks of `plan`, in that order."""

    snapshot: SealedSnapshot
    slots: tuple[SealedSlot, ...]
    plan: HostPlan


@dataclass(frozen=True, slots=True)
class GivenUpSnapshot:
    """A snapshot that will not be stored."""

    snapshot: SealedSnapshot
    slots: tuple[SealedSlot, ...]
    reason: str


def next_due(slots: Sequence[SealedSlot], plans: Mapping[int, HostPlan]) -> DueSnapshot | None:
    """Return the oldest snapshot that is due. `plans` are the successive contents of host.json, by round.

    A snapshot waits while any of its slots is pending: a writer may have been killed while it marked the slots as done.
    """
    given_up = {given.snapshot for given in to_give_up(slots, plans, has_workers=True)}
    for snapshot, members in _pending(slots).items():
        plan = _plan_of(snapshot.round, plans)
        if plan is not None and snapshot not in given_up and not _missing_ranks(members, plan):
            by_rank = {member.rank: member for member in members}
            return DueSnapshot(snapshot, tuple(by_rank[rank] for rank in plan.ranks), plan)
    return None


def to_give_up(
    slots: Sequence[SealedSlot], plans: Mapping[int, HostPlan], *, has_workers: bool
) -> list[GivenUpSnapshot]:
    """Return the snapshots that wait to be written but cannot be."""
    if not plans:
        return []
    found: list[GivenUpSnapshot] = []
    newest = max(plans)
    for snapshot, members in _pending(slots).items():
        plan = _plan_of(snapshot.round, plans)
        is_old = snapshot.round < newest
        reason = ""
        if plan is None:
            # a snapshot of a newer round than host.json waits for its own plan
            reason = f"host.json is of round {newest}, and the plan of round {snapshot.round} is unknown" * is_old
        elif is_superseded(snapshot, plan, slots):
            reason = f"round {newest} needs a checkpoint, and hosts of round {snapshot.round} may be gone"
        elif (missing := _missing_ranks(members, plan)) and (is_old or not has_workers):
            reason = f"not sealed by {ranks_text(missing)}, which cannot seal it any more"
        if reason:
            found.append(GivenUpSnapshot(snapshot, tuple(members), reason))
    return found


def is_superseded(snapshot: SealedSnapshot, plan: HostPlan, slots: Sequence[SealedSlot]) -> bool:
    """Return whether to stop waiting for other hosts: a newer round, maybe without them, has a pending snapshot."""
    return plan.num_hosts > 1 and any(other.round > snapshot.round for other in _pending(slots))


def is_pending(snapshot: SealedSnapshot, slots: Sequence[SealedSlot]) -> bool:
    """Return whether a snapshot still waits to be written: ranks give it up when another host failed to store it."""
    return snapshot in _pending(slots)


def is_taken_over(snapshot: SealedSnapshot, slots: Sequence[SealedSlot]) -> bool:
    """Return whether a newer round has a snapshot of the same step: it resumed from this one, so no step is lost."""
    return any(slot.words.step == snapshot.step and slot.words.round > snapshot.round for slot in slots)


def is_abandoned(mark: WritingMark | None, plan: HostPlan, now_unix_s: float) -> bool:
    """Return whether an incomplete checkpoint, older than a complete one of the branch, is abandoned.

    Without WRITING, the checkpoint is the rest of an interrupted removal. A checkpoint of this round is abandoned
    because the coordinator writes one checkpoint after another. A checkpoint of an older round counts as abandoned only
    when the writers on other hosts must have timed out.
    """
    if mark is None or mark.round == plan.round:
        return True
    return mark.round < plan.round and now_unix_s - mark.started_unix_s > 2 * plan.commit_timeout_s


def _pending(slots: Sequence[SealedSlot]) -> dict[SealedSnapshot, list[SealedSlot]]:
    """Return the snapshots of which any slot waits to be written, each with all of its slots, oldest first."""
    groups: dict[SealedSnapshot, list[SealedSlot]] = {}
    for slot in slots:
        groups.setdefault(slot.snapshot, []).append(slot)
    ordered = sorted(groups, key=lambda snapshot: (snapshot.round, snapshot.snapshot))
    return {
        snapshot: groups[snapshot]
        for snapshot in ordered
        if any(slot.words.persist == Persist.PENDING for slot in groups[snapshot])
    }


def _plan_of(round_number: int, plans: Mapping[int, HostPlan]) -> HostPlan | None:
    if round_number in plans or not plans:
        return plans.get(round_number)
    newest = plans[max(plans)]
    # a single host needs no agreement: the layout is compared when the slots are read
    is_alone = newest.num_hosts == 1 and round_number < newest.round
    return replace(newest, round=round_number, claim="") if is_alone else None


def _missing_ranks(members: Sequence[SealedSlot], plan: HostPlan) -> list[int]:
    return sorted(set(plan.ranks) - {member.rank for member in members})
