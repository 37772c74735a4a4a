"""Enter the host's arena, and agree with all ranks on the snapshots in memory.

Every rank reports the content of its host's arena. All ranks receive all reports and derive the same decisions from
them, by the pure functions of host_reports.py. The newest snapshot that is still in memory for every rank, on its own
host or at a peer, is preferred over storage unless storage has a newer checkpoint. So after a crash of workers only,
the job reads no tensors from storage.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.arena.directory import Arena, join_arena
from megatrain.arena.locks import HeldLock
from megatrain.arena.plans import HostPlan
from megatrain.arena.sealed import sealed_slots
from megatrain.arena.slot_layout import Persist, SealedSnapshot
from megatrain.checkpoint.agreement import raised_by_all
from megatrain.checkpoint.arena_slots import SnapshotPlan
from megatrain.checkpoint.host_reports import (
    HeldSnapshot,
    HostReport,
    maybe_storable_snapshots,
    memory_point,
    missing_ranks,
    newest_plan_rank,
    next_snapshot_number,
    storable_snapshots,
)
from megatrain.checkpoint.host_writer import wake_or_start_writer
from megatrain.checkpoint.peers import MemoryPoint
from megatrain.checkpoint.snapshot_offer import PlannedSlot
from megatrain.checkpoint.write_marks import WritingMark, claim, write_failed
from megatrain.checkpoint_format.checkpoint_names import step_directory_name
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.url_location import open_location
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.contracts.errors import CheckpointError

_POLL_S = 0.01
_LIST_AGAIN_S = 0.1
_QUIET_S = 3.0
"""The writer of a lost host may still run. It counts as gone when storage has not changed for this long."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """The arena that this rank has entered, and the decisions from the reports of all ranks.

    `memory` is the snapshot to resume from without storage, or None.
    """

    arena: Arena
    lock: HeldLock
    hosts: tuple[str, ...]
    """By rank."""
    last_round: int
    next_snapshot: int
    memory: MemoryPoint | None
    missing: tuple[int, ...]
    """The ranks that have to fetch the snapshot."""
    newest_plan_rank: int
    plans: tuple[PlannedSlot, ...]
    """The size and plan of each rank's slots, by rank."""
    may_have_stored: bool = False
    """Whether `attach` waited for writers, so that storage may have a newer checkpoint than before."""

    def ranks_of_host(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other, host in enumerate(self.hosts) if host == self.hosts[rank])


def attach(
    path: Path,
    plan: SnapshotPlan,
    rank: int,
    local_rank: int,
    cpu_groups: CpuGroups,
    *,
    num_slots: int,
    may_fetch: bool,
    log: Path,
    wait_storage_s: float,
    stored_step: int = -1,
    store_until_step: int | None = None,
) -> Attachment:
    """Enter the arena at `path`, creating it if necessary.

    Snapshots that the job cannot restore any more, because the layout changed or a host was lost, are written to
    storage first. This call waits up to `wait_storage_s` for those that can still be written.

    num_slots: the number of slots of a rank. may_fetch: whether a rank's snapshot may come from another host.
    stored_step: the step of the newest checkpoint in storage.
    store_until_step: when given, nothing is restored from memory; of the snapshots there, only those up to this step
    are still written to storage.
    Communication: one agreement, one gather and one broadcast; one more agreement after a wait for storage.
    Raises: CheckpointError, on every rank.
    """
    with raised_by_all(cpu_groups, rank):
        arena, lock = join_arena(path)
    last = _last_plan(arena) if local_rank == 0 else None
    report = HostReport(
        _host_name(path),
        plan.digest.hex(),
        last.round if last is not None else -1,
        tuple(_held_snapshots(arena, num_slots)) if local_rank == 0 else (),
        plan.num_bytes,
        last.ranks if last is not None else (),
        last.num_hosts if last is not None else 0,
    )
    gathered = cpu_groups.gather_json(rank, report.to_json())
    reports = [HostReport.from_json(raw) for raw in cpu_groups.broadcast_json(gathered)]
    memory = memory_point(reports, may_fetch=may_fetch) if store_until_step is None else None
    storable = storable_snapshots(reports) if memory is None else set()
    restored_step = -1 if memory is None else memory.snapshot.step
    maybe_storable = maybe_storable_snapshots(reports, newer_than=max(stored_step, restored_step))
    if store_until_step is not None:
        storable = {snapshot for snapshot in storable if snapshot.step <= store_until_step}
        maybe_storable = {snapshot for snapshot in maybe_storable if snapshot.step <= store_until_step}
    if storable or maybe_storable:
        if last is not None:
            _wait_until_stored(arena, num_slots, last, storable, maybe_storable, log, wait_storage_s)
        cpu_groups.all_agree(True)
    return Attachment(
        arena=arena,
        lock=lock,
        hosts=tuple(each.host for each in reports),
        last_round=max(each.last_round for each in reports),
        next_snapshot=next_snapshot_number(reports, memory, num_slots),
        memory=memory,
        missing=() if memory is None else missing_ranks(reports, memory.snapshot),
        newest_plan_rank=newest_plan_rank(reports),
        plans=tuple(PlannedSlot(owner, each.contents_bytes, each.plan_digest) for owner, each in enumerate(reports)),
        may_have_stored=bool(storable or maybe_storable),
    )


def _host_name(arena: Path) -> str:
    """Return a name that only ranks with the same arena share: two machines may have equal paths or host names."""
    status = arena.stat()
    return f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"


def _last_plan(arena: Arena) -> HostPlan | None:
    try:
        return HostPlan.read(arena.host_plan)
    except CheckpointError:
        return None


def _held_snapshots(arena: Arena, num_slots: int) -> list[HeldSnapshot]:
    held = []
    for slot in [*sealed_slots(arena, is_copy=True), *sealed_slots(arena)]:
        is_copy = slot.file.is_copy
        is_pending = slot.words.persist == Persist.PENDING and not is_copy
        is_kept = is_copy or slot.header.num_slots == num_slots
        digest = slot.header.plan_digest.hex() if is_kept else ""
        held.append(HeldSnapshot(slot.rank, slot.snapshot, digest, is_pending, is_copy))
    return held


def _wait_until_stored(
    arena: Arena,
    num_slots: int,
    plan: HostPlan,
    storable: set[SealedSnapshot],
    maybe_storable: set[SealedSnapshot],
    log: Path,
    wait_storage_s: float,
) -> None:
    """Wait for the writer to store pending snapshots. Those not stored in `wait_storage_s` are lost with their slots.

    maybe_storable: snapshots that need the writer of a lost host. This waits for them only while storage changes.
    """
    deadline = time.monotonic() + wait_storage_s
    wake_or_start_writer(arena, log)
    progress = _StorageProgress(plan)
    left = storable | maybe_storable
    while time.monotonic() < deadline:
        left &= {held.snapshot for held in _held_snapshots(arena, num_slots) if held.is_pending}
        if not left or (left <= maybe_storable and progress.quiet_s(left) > _QUIET_S):
            break
        time.sleep(_POLL_S)
    give_up(plan, left)


def give_up(plan: HostPlan, snapshots: Iterable[SealedSnapshot]) -> None:
    """Notify the writers of other hosts not to wait for these snapshots, which this host has not stored."""
    for snapshot in snapshots:
        with suppress(CheckpointError):
            directory = _directory_of(snapshot, plan)
            # a directory without WRITING counts as a checkpoint that lost its COMMIT, which stops the job
            claim(directory, WritingMark(snapshot.round, plan.job, time.time()))
            write_failed(directory, snapshot, plan.host_index, "a newer start of the job continues without it")


def _directory_of(snapshot: SealedSnapshot, plan: HostPlan) -> Location:
    """Return the directory in which a snapshot becomes a checkpoint."""
    return open_location(plan.checkpoints) / plan.branch / step_directory_name(snapshot.step)


class _StorageProgress:
    """Watches the directories of unfinished checkpoints for changes."""

    def __init__(self, plan: HostPlan) -> None:
        self._plan = plan
        self._seen: list[tuple[str, int | None]] | None = None
        self._changed_at = self._listed_at = time.monotonic()

    def quiet_s(self, snapshots: Iterable[SealedSnapshot]) -> float:
        """Return for how many seconds nothing has changed in the snapshots' directories."""
        now = time.monotonic()
        if self._seen is None or now - self._listed_at > _LIST_AGAIN_S:
            found = self._listing(sorted(snapshots))
            self._listed_at = time.monotonic()
            if found != self._seen:
                self._seen, self._changed_at = found, self._listed_at
        return self._listed_at - self._changed_at

    def _listing(self, snapshots: Sequence[SealedSnapshot]) -> list[tuple[str, int | None]]:
        found = []
        for snapshot in snapshots:
            # a directory that cannot be read counts as unchanged
            with suppress(CheckpointError):
                found += [(str(entry), entry.size()) for entry in _directory_of(snapshot, self._plan).entries()]
        return sorted(found, key=lambda pair: pair[0])
