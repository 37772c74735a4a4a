"""The report of every rank on its host's arena, and the decisions that all ranks derive from all reports.

Pure functions: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from megatrain.arena.slot_layout import SealedSnapshot
from megatrain.checkpoint.peers import MemoryPoint, newest_in_memory


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A sealed snapshot of rank `owner` in the arena of the host that reports it.

    plan_digest: "" for a slot that will be removed because the number of slots changes.
    """

    owner: int
    snapshot: SealedSnapshot
    plan_digest: str
    is_pending: bool
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class HostReport:
    """A rank's report: its host, its own plan, and, from the first rank of a host, the content of the arena."""

    host: str
    plan_digest: str
    last_round: int
    held: tuple[HeldSnapshot, ...]
    contents_bytes: int = 0
    """The size of the contents of a slot by the rank's own plan."""
    last_ranks: tuple[int, ...] = ()
    """The ranks of this host in its last round, which had `last_hosts` hosts."""
    last_hosts: int = 0

    def to_json(self) -> list[Any]:
        held = [astuple(kept) for kept in self.held]
        return [
            self.host,
            self.plan_digest,
            self.last_round,
            held,
            self.contents_bytes,
            self.last_ranks,
            self.last_hosts,
        ]

    @staticmethod
    def from_json(raw: list[Any]) -> HostReport:
        held = (HeldSnapshot(owner, SealedSnapshot(*snapshot), *rest) for owner, snapshot, *rest in raw[3])
        return HostReport(raw[0], raw[1], raw[2], tuple(held), raw[4], tuple(raw[5]), raw[6])


def memory_point(reports: Sequence[HostReport], *, may_fetch: bool = True) -> MemoryPoint | None:
    """Return the newest snapshot that all ranks can restore, in slots that match their current plans.

    may_fetch: whether a rank's snapshot may come from outside its own slots.
    """
    if max(report.last_round for report in reports) < 0:
        return None  # without a host plan, the data and configuration of a snapshot are unknown
    held: list[dict[int, list[SealedSnapshot]]] = []
    for report in reports:
        by_owner: dict[int, list[SealedSnapshot]] = {}
        for kept in report.held:
            if kept.owner < len(reports) and _is_usable(kept, report, reports[kept.owner], may_fetch=may_fetch):
                by_owner.setdefault(kept.owner, []).append(kept.snapshot)
        held.append(by_owner)
    return newest_in_memory(held, [report.host for report in reports])


def missing_ranks(reports: Sequence[HostReport], snapshot: SealedSnapshot) -> tuple[int, ...]:
    """Return the ranks that do not have this snapshot in slots of their own."""
    own = {
        held.owner
        for report in reports
        for held in report.held
        if held.snapshot == snapshot
        and held.owner < len(reports)
        and _is_usable(held, report, reports[held.owner], may_fetch=False)
    }
    return tuple(rank for rank in range(len(reports)) if rank not in own)


def _is_usable(held: HeldSnapshot, holder: HostReport, owner: HostReport, *, may_fetch: bool) -> bool:
    is_in_place = holder.host == owner.host and not held.is_copy
    return held.plan_digest == owner.plan_digest and (may_fetch or is_in_place)


def newest_plan_rank(reports: Sequence[HostReport]) -> int:
    """Return the rank whose host has the job's newest plan, the one that was agreed on in the last round."""
    return max(range(len(reports)), key=lambda rank: (reports[rank].last_round, -rank))


def storable_snapshots(reports: Sequence[HostReport]) -> set[SealedSnapshot]:
    """Return the pending snapshots that can still be stored: all hosts of their round are present and have their parts.

    For any other snapshot, a writer would wait for files that never appear.
    """
    found = set()
    for snapshot in {held.snapshot for report in reports for held in report.held if held.is_pending}:
        holders = [report for report in reports if report.last_ranks and _has_all_of(report, snapshot)]
        if holders and len(holders) >= max(report.last_hosts for report in holders):
            found.add(snapshot)
    return found


def maybe_storable_snapshots(reports: Sequence[HostReport], *, newer_than: int) -> set[SealedSnapshot]:
    """Return the snapshots after step `newer_than` that can be stored if the writers of lost hosts are still running.

    Every host of their round that is still present has the snapshots of all its ranks.
    """
    storable = storable_snapshots(reports)
    found = set()
    for snapshot in {held.snapshot for report in reports for held in report.held if held.is_pending}:
        involved = [report for report in reports if report.last_ranks and report.last_round >= snapshot.round]
        if snapshot.step > newer_than and involved and all(_has_all_of(report, snapshot) for report in involved):
            found.add(snapshot)
    return found - storable


def _has_all_of(report: HostReport, snapshot: SealedSnapshot) -> bool:
    return set(report.last_ranks) <= {
        held.owner for held in report.held if held.snapshot == snapshot and not held.is_copy
    }


def next_snapshot_number(reports: Sequence[HostReport], memory: MemoryPoint | None, num_slots: int) -> int:
    """Return a number above that of every snapshot in any arena, for another slot than that of `memory` if possible."""
    least = max((held.snapshot.snapshot + 1 for report in reports for held in report.held), default=0)
    if memory is None or num_slots == 1:
        return least
    # if only some ranks sealed a newer snapshot, the job would overwrite the one that it resumed from
    return least + (least % num_slots == memory.snapshot.snapshot % num_slots)
