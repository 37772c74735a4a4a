"""Enter the host's arena, and agree with all ranks on what is in it.

Every rank reports what it sees, rank 0 decides (pure functions, here on top), and all do the same. The newest snapshot
that every rank's host, or a peer for it, still has beats storage: after a mere crash nothing is read from there.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from megatrain.checkpoint.arena_slots import SnapshotPlan
from megatrain.checkpoint.peers import MemoryPoint, newest_in_memory
from megatrain.checkpoint.snapshot_offer import PlannedSlot
from megatrain.checkpoint.writer import call_writer
from megatrain.comm.host_groups import HostGroups
from megatrain.contracts.arena import Arena, SealedSnapshot, join_arena
from megatrain.contracts.arena_layout import Persist, SlotState
from megatrain.contracts.arena_locks import HeldLock
from megatrain.contracts.arena_plans import HostPlan
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.errors import CheckpointError

_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Held:
    """A sealed snapshot of rank `owner` in the arena of the host that reports it.

    plan_digest: "" for a slot that gives way because there are to be more or fewer of them.
    """

    owner: int
    snapshot: SealedSnapshot
    plan_digest: str
    is_wanted: bool
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a rank sees: its host, its own plan, and, if it is the first of its host, what is in the arena."""

    host: str
    plan_digest: str
    last_round: int
    held: tuple[Held, ...]
    image_bytes: int = 0
    """Of the rank's own plan."""
    last_ranks: tuple[int, ...] = ()
    """Those of this host in its last round, which had `last_hosts`."""
    last_hosts: int = 0

    def to_json(self) -> list[Any]:
        held = [astuple(one) for one in self.held]
        return [self.host, self.plan_digest, self.last_round, held, self.image_bytes, self.last_ranks, self.last_hosts]

    @staticmethod
    def from_json(raw: list[Any]) -> HostReport:
        held = (Held(owner, SealedSnapshot(*snapshot), *rest) for owner, snapshot, *rest in raw[3])
        return HostReport(raw[0], raw[1], raw[2], tuple(held), raw[4], tuple(raw[5]), raw[6])


def memory_point(reports: Sequence[HostReport], *, may_fetch: bool = True) -> MemoryPoint | None:
    """Return the newest snapshot that all ranks can go back to, in slots of the plans that they have now.

    may_fetch: whether a rank's snapshot may be elsewhere than in its own slots.
    """
    if max(report.last_round for report in reports) < 0:
        return None  # nobody has a plan that says of which data and configuration they are
    held: list[dict[int, list[SealedSnapshot]]] = []
    for report in reports:
        by_owner: dict[int, list[SealedSnapshot]] = {}
        for one in report.held:
            if one.owner < len(reports) and _is_usable(one, report, reports[one.owner], may_fetch=may_fetch):
                by_owner.setdefault(one.owner, []).append(one.snapshot)
        held.append(by_owner)
    return newest_in_memory(held, [report.host for report in reports])


def missing_ranks(reports: Sequence[HostReport], snapshot: SealedSnapshot) -> tuple[int, ...]:
    """Return the ranks that have not this snapshot in slots of their own."""
    own = {
        one.owner
        for report in reports
        for one in report.held
        if one.snapshot == snapshot
        and one.owner < len(reports)
        and _is_usable(one, report, reports[one.owner], may_fetch=False)
    }
    return tuple(rank for rank in range(len(reports)) if rank not in own)


def _is_usable(one: Held, holder: HostReport, owner: HostReport, *, may_fetch: bool) -> bool:
    is_in_place = holder.host == owner.host and not one.is_copy
    return one.plan_digest == owner.plan_digest and (may_fetch or is_in_place)


def informed_rank(reports: Sequence[HostReport]) -> int:
    """Return the rank whose host has the newest plan of the job: what was agreed on in the last round."""
    return max(range(len(reports)), key=lambda rank: (reports[rank].last_round, -rank))


def to_settle(reports: Sequence[HostReport]) -> set[SealedSnapshot]:
    """Return the snapshots that storage wants and can still get: all hosts of their round are there and have all of it.

    For another one, a writer would wait in vain.
    """
    found = set()
    for snapshot in {one.snapshot for report in reports for one in report.held if one.is_wanted}:
        holders = [report for report in reports if report.last_ranks and _has_all_of(report, snapshot)]
        if holders and len(holders) >= max(report.last_hosts for report in holders):
            found.add(snapshot)
    return found


def _has_all_of(report: HostReport, snapshot: SealedSnapshot) -> bool:
    return set(report.last_ranks) <= {one.owner for one in report.held if one.snapshot == snapshot and not one.is_copy}


def next_snapshot_number(reports: Sequence[HostReport], memory: MemoryPoint | None, num_slots: int) -> int:
    """Return a number above that of every snapshot in any arena, of another slot than `memory` where there is one."""
    least = max((one.snapshot.snapshot + 1 for report in reports for one in report.held), default=0)
    if memory is None or num_slots == 1:
        return least
    # a newer one that only some ranks sealed would have the job overwrite what it went on from
    return least + (least % num_slots == memory.snapshot.snapshot % num_slots)


@dataclass(frozen=True, slots=True)
class Attachment:
    """This rank's place in the arena. `memory` is the snapshot to go on from without storage, None without one."""

    arena: Arena
    lock: HeldLock
    hosts: tuple[str, ...]
    """By rank."""
    last_round: int
    next_snapshot: int
    memory: MemoryPoint | None
    missing: tuple[int, ...]
    """The ranks that have to fetch it."""
    informed_rank: int
    plans: tuple[PlannedSlot, ...]
    """What a slot of each rank is, by rank."""

    def ranks_of_host(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other, host in enumerate(self.hosts) if host == self.hosts[rank])


def attach(
    path: Path,
    plan: SnapshotPlan,
    rank: int,
    local_rank: int,
    host: HostGroups,
    *,
    num_slots: int,
    may_fetch: bool,
    log: Path,
    settle_s: float,
) -> Attachment:
    """Enter the arena at `path`, which is made when it is not there.

    Snapshots in it that nobody can go back to any more, because the layout is another now, are brought to storage
    first: up to `settle_s` are waited for that.
    num_slots, may_fetch: how many slots a rank is to have, and whether its snapshot may come from another host.
    Communication: one gather and one broadcast.
    Raises: CheckpointError, on every rank.
    """
    arena, lock, problem = None, None, None
    try:
        arena, lock = join_arena(path)
    except CheckpointError as error:
        problem = str(error)
    first = host.agree(rank, problem)
    if first is not None or arena is None or lock is None:
        raise CheckpointError(first or str(problem))
    last = _last_plan(arena) if local_rank == 0 else None
    report = HostReport(
        _host_name(path),
        plan.digest.hex(),
        last.round if last is not None else -1,
        tuple(_held(arena, num_slots)) if local_rank == 0 else (),
        plan.num_bytes,
        last.ranks if last is not None else (),
        last.num_hosts if last is not None else 0,
    )
    gathered = host.gather_json(rank, report.to_json())
    reports = [HostReport.from_json(raw) for raw in host.broadcast_json(gathered)]
    memory = memory_point(reports, may_fetch=may_fetch)
    wanted = to_settle(reports) if memory is None else set()
    if wanted:
        if local_rank == 0:
            _settle(arena, num_slots, wanted, log, settle_s)
        host.all_agree(True)
    return Attachment(
        arena=arena,
        lock=lock,
        hosts=tuple(each.host for each in reports),
        last_round=max(each.last_round for each in reports),
        next_snapshot=next_snapshot_number(reports, memory, num_slots),
        memory=memory,
        missing=() if memory is None else missing_ranks(reports, memory.snapshot),
        informed_rank=informed_rank(reports),
        plans=tuple(PlannedSlot(owner, each.image_bytes, each.plan_digest) for owner, each in enumerate(reports)),
    )


def _host_name(arena: Path) -> str:
    """Return what ranks that share an arena have in common: two machines may have the same path, or the same name."""
    status = arena.stat()
    return f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"


def _last_plan(arena: Arena) -> HostPlan | None:
    try:
        return HostPlan.read(arena.host_plan)
    except CheckpointError:
        return None


def _held(arena: Arena, num_slots: int) -> list[Held]:
    held = []
    for file in arena.slots():
        try:
            with SlotReader(file.path) as reader:
                header, words = reader.header, reader.words()
        except CheckpointError:
            continue
        if header.rank == file.rank and words.state == SlotState.SEALED:
            snapshot = SealedSnapshot(words.step, words.round, words.snapshot)
            is_wanted = words.persist == Persist.WANTED and not file.is_copy
            is_kept = file.is_copy or header.num_slots == num_slots
            digest = header.plan_digest.hex() if is_kept else ""
            held.append(Held(header.rank, snapshot, digest, is_wanted, file.is_copy))
    return held


def _settle(arena: Arena, num_slots: int, wanted: set[SealedSnapshot], log: Path, settle_s: float) -> None:
    """Let the writer bring to storage what is wanted there; what it cannot in that time is lost with its slots."""
    deadline = time.monotonic() + settle_s
    call_writer(arena, log)
    while time.monotonic() < deadline:
        if not any(one.is_wanted and one.snapshot in wanted for one in _held(arena, num_slots)):
            break
        time.sleep(_POLL_S)
