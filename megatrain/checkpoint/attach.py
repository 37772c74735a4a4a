"""Enter the host's arena, and agree with all ranks on what is in it.

Every rank reports what it sees, rank 0 decides (pure functions, here on top), and all do the same. The newest snapshot
that every rank's host, or a peer for it, still has beats storage: after a mere crash nothing is read from there.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from megatrain.checkpoint.agreement import raised_by_all
from megatrain.checkpoint.arena_slots import SnapshotPlan
from megatrain.checkpoint.peers import MemoryPoint, newest_in_memory
from megatrain.checkpoint.snapshot_offer import PlannedSlot
from megatrain.checkpoint.url_location import open_location
from megatrain.checkpoint.write_marks import WritingMark, claim, write_failed
from megatrain.checkpoint.writer import call_writer
from megatrain.comm.host_groups import HostGroups
from megatrain.contracts.arena import Arena, SealedSnapshot, join_arena
from megatrain.contracts.arena_layout import Persist, SlotState
from megatrain.contracts.arena_locks import HeldLock
from megatrain.contracts.arena_plans import HostPlan
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.checkpoint_files import step_directory_name
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import Location

_POLL_S = 0.01
_LOOK_AT_STORAGE_S = 0.1
_QUIET_S = 3.0
"""A lost host's writer may have outlived its workers: it counts as gone when storage shows no change for so long."""


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

    A writer would wait for another one for ever.
    """
    found = set()
    for snapshot in {one.snapshot for report in reports for one in report.held if one.is_wanted}:
        holders = [report for report in reports if report.last_ranks and _has_all_of(report, snapshot)]
        if holders and len(holders) >= max(report.last_hosts for report in holders):
            found.add(snapshot)
    return found


def may_settle(reports: Sequence[HostReport], *, newer_than: int) -> set[SealedSnapshot]:
    """Return the snapshots after step `newer_than` that storage gets if the writers of lost hosts have outlived them.

    Every host of their round that is still there has all of it.
    """
    certain = to_settle(reports)
    found = set()
    for snapshot in {one.snapshot for report in reports for one in report.held if one.is_wanted}:
        involved = [report for report in reports if report.last_ranks and report.last_round >= snapshot.round]
        if snapshot.step > newer_than and involved and all(_has_all_of(report, snapshot) for report in involved):
            found.add(snapshot)
    return found - certain


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
    may_have_stored: bool = False
    """Writers were waited for: storage may have a newer checkpoint than before."""

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
    stored_step: int = -1,
    settle_until: int | None = None,
) -> Attachment:
    """Enter the arena at `path`, which is made when it is not there.

    Snapshots in it that no rank can restore any more, because the layout is another now or a host is lost, are
    brought to storage first: up to `settle_s` are waited for that, while there is hope.
    num_slots, may_fetch: how many slots a rank is to have, and whether its snapshot may come from another host.
    stored_step: of the newest checkpoint in storage.
    settle_until: what is in memory counts no more, and of it storage is to have what is not newer than this step.
    Communication: one gather and one broadcast.
    Raises: CheckpointError, on every rank.
    """
    with raised_by_all(host, rank):
        arena, lock = join_arena(path)
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
    memory = memory_point(reports, may_fetch=may_fetch) if settle_until is None else None
    certain = to_settle(reports) if memory is None else set()
    hoped_for = may_settle(reports, newer_than=max(stored_step, -1 if memory is None else memory.snapshot.step))
    if settle_until is not None:
        certain, hoped_for = ({one for one in found if one.step <= settle_until} for found in (certain, hoped_for))
    if certain or hoped_for:
        if last is not None:
            _settle(arena, num_slots, last, certain, hoped_for, log, settle_s)
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
        may_have_stored=bool(certain or hoped_for),
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


def _settle(
    arena: Arena,
    num_slots: int,
    plan: HostPlan,
    certain: set[SealedSnapshot],
    hoped_for: set[SealedSnapshot],
    log: Path,
    settle_s: float,
) -> None:
    """Let the writer bring to storage what is wanted there; what it cannot in that time is lost with its slots.

    hoped_for: what needs the writer of a lost host, which is waited for only as long as storage shows that it works.
    """
    deadline = time.monotonic() + settle_s
    call_writer(arena, log)
    progress = _StorageProgress(plan)
    left = certain | hoped_for
    while time.monotonic() < deadline:
        left &= {one.snapshot for one in _held(arena, num_slots) if one.is_wanted}
        if not left or (left <= hoped_for and progress.quiet_s(left) > _QUIET_S):
            break
        time.sleep(_POLL_S)
    give_up(plan, left)


def give_up(plan: HostPlan, snapshots: Iterable[SealedSnapshot]) -> None:
    """Tell the writers of other hosts not to wait for what was in this host's slots, where that is not stored."""
    for snapshot in snapshots:
        with suppress(CheckpointError):
            directory = _directory_of(snapshot, plan)
            # without WRITING a checkpoint looks as if it had lost its COMMIT, and stops the job
            claim(directory, WritingMark(snapshot.round, plan.job, time.time()))
            write_failed(directory, snapshot, plan.host_index, "a newer start of the job goes on without it")


def _directory_of(snapshot: SealedSnapshot, plan: HostPlan) -> Location:
    """Return where a snapshot becomes a checkpoint."""
    return open_location(plan.checkpoints) / plan.branch / step_directory_name(snapshot.step)


class _StorageProgress:
    """What happens in the directories of checkpoints that are being made."""

    def __init__(self, plan: HostPlan) -> None:
        self._plan = plan
        self._seen: list[tuple[str, int | None]] | None = None
        self._changed_at = self._looked_at = time.monotonic()

    def quiet_s(self, snapshots: Iterable[SealedSnapshot]) -> float:
        """Return for how long nothing has changed in their directories."""
        now = time.monotonic()
        if self._seen is None or now - self._looked_at > _LOOK_AT_STORAGE_S:
            found = self._look(sorted(snapshots))
            self._looked_at = time.monotonic()
            if found != self._seen:
                self._seen, self._changed_at = found, self._looked_at
        return self._looked_at - self._changed_at

    def _look(self, snapshots: Sequence[SealedSnapshot]) -> list[tuple[str, int | None]]:
        found = []
        for snapshot in snapshots:
            # what cannot be read changes nothing
            with suppress(CheckpointError):
                found += [(str(entry), entry.size()) for entry in _directory_of(snapshot, self._plan).entries()]
        return sorted(found, key=lambda one: one[0])
