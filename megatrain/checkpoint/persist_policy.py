"""What a host's writer does next, as pure functions of what it sees: slots in, decisions and their reasons out.

A snapshot is due when the slots of all ranks of this host have it and storage wants it. One that can never become due,
or that no process would wait for any more, is given up, because its slots are not used again while storage wants them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.checkpoint.write_marks import WritingMark
from megatrain.contracts.arena import SealedSnapshot
from megatrain.contracts.arena_layout import Persist, SlotWords
from megatrain.contracts.arena_plans import HostPlan

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class SealedSlot:
    """A slot of a rank of this host with a whole snapshot in it."""

    path: Path
    rank: int
    words: SlotWords

    @property
    def snapshot(self) -> SealedSnapshot:
        return SealedSnapshot(self.words.step, self.words.round, self.words.snapshot)


@dataclass(frozen=True, slots=True)
class Due:
    """A snapshot to bring to storage. `slots` are those of the ranks of `plan`, in that order."""

    snapshot: SealedSnapshot
    slots: tuple[SealedSlot, ...]
    plan: HostPlan


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A snapshot that will not be brought to storage."""

    snapshot: SealedSnapshot
    slots: tuple[SealedSlot, ...]
    reason: str


def next_due(slots: Sequence[SealedSlot], plans: Mapping[int, HostPlan]) -> Due | None:
    """Return the oldest snapshot that is due. `plans` are the ones that host.json had, by round.

    A snapshot counts while any of its slots is wanted: a writer may have been killed while it said that all are done.
    """
    given_up = {one.snapshot for one in to_give_up(slots, plans, has_workers=True)}
    for snapshot, members in _wanted(slots).items():
        plan = _plan_of(snapshot.round, plans)
        if plan is not None and snapshot not in given_up and not _missing_ranks(members, plan):
            by_rank = {member.rank: member for member in members}
            return Due(snapshot, tuple(by_rank[rank] for rank in plan.ranks), plan)
    return None


def to_give_up(slots: Sequence[SealedSlot], plans: Mapping[int, HostPlan], *, has_workers: bool) -> list[GivenUp]:
    """Return the snapshots that storage wants and will not get."""
    if not plans:
        return []
    found: list[GivenUp] = []
    newest = max(plans)
    wanted = _wanted(slots)
    for snapshot, members in wanted.items():
        plan = _plan_of(snapshot.round, plans)
        is_old = snapshot.round < newest
        reason = ""
        if plan is None:
            # one of a newer round than host.json waits for it
            reason = f"host.json is of round {newest}, and what round {snapshot.round} wanted is not known" * is_old
        elif is_superseded(snapshot, plan, slots):
            reason = f"round {newest} wants one, and hosts of round {snapshot.round} may be gone"
        elif (missing := _missing_ranks(members, plan)) and (is_old or not has_workers):
            reason = f"not sealed by {_ranks_text(missing)}, which will not do it any more"
        if reason:
            found.append(GivenUp(snapshot, tuple(members), reason))
    return found


def is_superseded(snapshot: SealedSnapshot, plan: HostPlan, slots: Sequence[SealedSlot]) -> bool:
    """Say whether to wait no longer for the other hosts: a newer round, which may have others, wants its own."""
    return plan.num_hosts > 1 and any(other.round > snapshot.round for other in _wanted(slots))


def is_taken_over(snapshot: SealedSnapshot, slots: Sequence[SealedSlot]) -> bool:
    """Say whether a newer round goes on from this snapshot under a number of its own: its step is not lost."""
    return any(slot.words.step == snapshot.step and slot.words.round > snapshot.round for slot in slots)


def is_abandoned(mark: WritingMark | None, plan: HostPlan, now_unix_s: float) -> bool:
    """Say whether an incomplete checkpoint, older than a complete one of the branch, is abandoned.

    Without WRITING it is what a removal left. Of this round, the coordinator makes one after another. The writer of an
    older round, on another host, may still be at it, until it has waited long enough.
    """
    if mark is None or mark.round == plan.round:
        return True
    return mark.round < plan.round and now_unix_s - mark.started_unix_s > 2 * plan.commit_timeout_s


def pauses_s() -> Iterator[float]:
    """Yield how long to wait between one look at the storage and the next, longer each time."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _wanted(slots: Sequence[SealedSlot]) -> dict[SealedSnapshot, list[SealedSlot]]:
    """Return the snapshots of which storage wants any slot with all their slots, oldest first."""
    groups: dict[SealedSnapshot, list[SealedSlot]] = {}
    for slot in slots:
        groups.setdefault(slot.snapshot, []).append(slot)
    ordered = sorted(groups, key=lambda snapshot: (snapshot.round, snapshot.snapshot))
    return {
        snapshot: groups[snapshot]
        for snapshot in ordered
        if any(slot.words.persist == Persist.WANTED for slot in groups[snapshot])
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


def _ranks_text(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:5])) + (" and more" if len(ranks) > 5 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
