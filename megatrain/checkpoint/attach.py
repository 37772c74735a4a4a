"""Enter the host's arena, and agree with all ranks on what is in it and whether it has room.

Every rank reports what it sees, rank 0 decides (pure functions, here on top), and all do the same. The newest snapshot
that every rank's host still has beats storage: after a mere crash of workers nothing is read from there.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from megatrain.checkpoint.arena_slots import SnapshotPlan, missing_bytes
from megatrain.checkpoint.peers import MemoryPoint, newest_in_memory
from megatrain.checkpoint.writer import start_writer
from megatrain.comm.host_groups import HostGroups
from megatrain.contracts.arena import Arena, SealedSnapshot, join_arena, wake_writer
from megatrain.contracts.arena_layout import Persist, SlotState
from megatrain.contracts.arena_locks import HeldLock
from megatrain.contracts.arena_plans import HostPlan
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.errors import CheckpointError, ConfigError

_SPARE_BYTES = 64 << 20
"""Left free in the arena's file system: black boxes, NCCL and data loaders want some of it."""
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Held:
    """A sealed snapshot of rank `owner` in the arena of the host that reports it."""

    owner: int
    snapshot: SealedSnapshot
    plan_digest: str
    is_wanted: bool


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a rank sees: its host, its own plan, and, if it is the first of its host, what is in the arena."""

    host: str
    plan_digest: str
    last_round: int
    held: tuple[Held, ...]

    def to_json(self) -> list[Any]:
        return [self.host, self.plan_digest, self.last_round, [astuple(one) for one in self.held]]

    @staticmethod
    def from_json(raw: list[Any]) -> HostReport:
        held = (Held(owner, SealedSnapshot(*snapshot), digest, wanted) for owner, snapshot, digest, wanted in raw[3])
        return HostReport(raw[0], raw[1], raw[2], tuple(held))


def memory_point(reports: Sequence[HostReport]) -> MemoryPoint | None:
    """Return the newest snapshot that all ranks can go back to, in slots of the plans that they have now."""
    held: list[dict[int, list[SealedSnapshot]]] = []
    for report in reports:
        by_owner: dict[int, list[SealedSnapshot]] = {}
        for one in report.held:
            if one.owner < len(reports) and one.plan_digest == reports[one.owner].plan_digest:
                by_owner.setdefault(one.owner, []).append(one.snapshot)
        held.append(by_owner)
    return newest_in_memory(held, [report.host for report in reports])


def next_snapshot_number(reports: Sequence[HostReport]) -> int:
    """Return a number above that of every snapshot in any arena."""
    return max((one.snapshot.snapshot + 1 for report in reports for one in report.held), default=0)


def room_problem(
    hosts: Sequence[str], needed: Sequence[int], free: Sequence[int], slots: int, where: str
) -> str | None:
    """Return why the slots of some host's ranks would not fit, with the arithmetic; None when all fit.

    needed, free: by rank, in bytes; ranks of one host see the same memory, the last one to look sees it right.
    """
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, name in enumerate(hosts) if name == host]
        total, available = sum(needed[rank] for rank in ranks), max(free[rank] for rank in ranks)
        if total and total + _SPARE_BYTES > available:
            return (
                f"checkpoint.slots={slots}: the {len(ranks)} ranks of host {host} need {_gigabytes(total)} more for "
                f"snapshots in {where}, and {_gigabytes(_SPARE_BYTES)} are left free, but there are "
                f"{_gigabytes(available)}; use checkpoint.slots=1, fewer ranks a host, more memory (/dev/shm is often "
                "smaller than RAM), or another checkpoint.arena_directory"
            )
    return None


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


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

    def ranks_of_host(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other, host in enumerate(self.hosts) if host == self.hosts[rank])


def attach(
    path: Path, plan: SnapshotPlan, rank: int, local_rank: int, host: HostGroups, *, log: Path, settle_s: float
) -> Attachment:
    """Enter the arena at `path`, which is made when it is not there.

    Snapshots in it that nobody can go back to any more, because the layout is another now, are brought to storage
    first: up to `settle_s` are waited for that.
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
    report = HostReport(
        _host_name(path),
        plan.digest.hex(),
        _last_round(arena) if local_rank == 0 else -1,
        tuple(_held(arena)) if local_rank == 0 else (),
    )
    gathered = host.gather_json(rank, report.to_json())
    reports = [HostReport.from_json(raw) for raw in host.broadcast_json(gathered)]
    memory = memory_point(reports)
    if memory is None and any(one.is_wanted for each in reports for one in each.held):
        if local_rank == 0:
            _settle(arena, log, settle_s)
        host.all_agree(True)
    return Attachment(
        arena=arena,
        lock=lock,
        hosts=tuple(each.host for each in reports),
        last_round=max(each.last_round for each in reports),
        next_snapshot=next_snapshot_number(reports),
        memory=memory,
    )


def check_room(attachment: Attachment, plan: SnapshotPlan, num_slots: int, rank: int, host: HostGroups) -> None:
    """Make room for this rank's slots, and refuse to go on where they would not fit.

    Communication: one gather and one broadcast.
    Raises: ConfigError with the arithmetic, the same on every rank.
    """
    arena = attachment.arena
    needed = missing_bytes(arena, rank, num_slots, plan)
    gathered = host.gather_json(rank, [needed, _free_bytes(arena.root)])
    problem = None
    if gathered is not None:
        problem = room_problem(
            attachment.hosts,
            [each[0] for each in gathered],
            [each[1] for each in gathered],
            num_slots,
            str(arena.root.parent),
        )
    problem = host.broadcast_json(problem)
    if problem is not None:
        raise ConfigError([problem])


def _host_name(arena: Path) -> str:
    """Return what ranks that share an arena have in common: two machines may have the same path, or the same name."""
    status = arena.stat()
    return f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"


def _last_round(arena: Arena) -> int:
    try:
        return HostPlan.read(arena.host_plan).round
    except CheckpointError:
        return -1


def _held(arena: Arena) -> list[Held]:
    held = []
    for file in arena.slots():
        try:
            with SlotReader(file.path) as reader:
                header, words = reader.header, reader.words()
        except CheckpointError:
            continue
        if words.state == SlotState.SEALED:
            snapshot = SealedSnapshot(words.step, words.round, words.snapshot)
            is_wanted = words.persist == Persist.WANTED and not file.is_copy
            held.append(Held(header.rank, snapshot, header.plan_digest.hex(), is_wanted))
    return held


def _settle(arena: Arena, log: Path, settle_s: float) -> None:
    """Let the writer bring to storage what is wanted there; what it cannot in that time is lost with its slots."""
    deadline = time.monotonic() + settle_s
    start_writer(arena, log)
    wake_writer(arena)
    while any(one.is_wanted for one in _held(arena)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return free
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), free)
    return min(free, available)
