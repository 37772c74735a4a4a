"""The arena of a host: a directory on tmpfs that outlives its workers and holds their newest snapshots.

Workers write slots (arena_layout.py) and plans (arena_plans.py) into it, one writer process brings them to storage,
and a launcher may look. /dev/shm is world-writable, so the directory is used only if it is ours alone: nobody else can
have put a file or a link in it. Whoever is in an arena holds one of its locks (arena_locks.py), and it is removed only
by one who has both. All names end here; mapping and filling slots is megatrain.checkpoint's.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.arena_layout import SlotState
from megatrain.contracts.arena_locks import HeldLock, create_wake, hold_alone, hold_shared, wake
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.own_files import NotOwnError, check_own_directory, make_own_directory
from megatrain.contracts.run_directory import safe_name

_SLOT_NAME = re.compile(r"(rank|copy)-([0-9]{5,})\.slot-([0-9])")
_PREFIX = "megatrain-arena1."
_NUM_JOIN_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class SlotFile:
    """A slot as its name describes it. The host of `rank` sent a copy."""

    path: Path
    rank: int
    slot: int
    is_copy: bool


@dataclass(frozen=True, slots=True)
class Arena:
    """The names in an arena's directory."""

    root: Path

    def slot(self, rank: int, slot: int) -> Path:
        return self.root / f"rank-{rank:05d}.slot-{slot}"

    def copy(self, rank: int, slot: int) -> Path:
        """The copy that this host holds of a slot of another host's rank."""
        return self.root / f"copy-{rank:05d}.slot-{slot}"

    def slots(self) -> list[SlotFile]:
        """Return the slots and copies that are there.

        Raises: CheckpointError when the directory cannot be listed; MissingFileError when it is gone.
        """
        try:
            names = sorted(os.listdir(self.root))
        except FileNotFoundError as error:
            raise MissingFileError(f"{self.root}: the arena is gone") from error
        except OSError as error:
            raise CheckpointError(f"{self.root}: the arena cannot be listed: {error.strerror}") from error
        matches = [match for match in map(_SLOT_NAME.fullmatch, names) if match is not None]
        return [SlotFile(self.root / m[0], int(m[2]), int(m[3]), m[1] == "copy") for m in matches]

    @property
    def host_plan(self) -> Path:
        return self.root / "host.json"

    def rank_plan(self, rank: int) -> Path:
        return self.root / f"plan-{rank:05d}.json"

    def metadata(self, round_number: int) -> Path:
        """The `.metadata` of the checkpoints of a round, in the coordinator's arena."""
        return self.root / f"metadata-r{round_number:06d}.bin"

    @property
    def writer_status(self) -> Path:
        return self.root / "status.json"

    @property
    def wake(self) -> Path:
        return self.root / "wake"

    @property
    def writer_lock(self) -> Path:
        """Held alone by the writer process."""
        return self.root / "writer.lock"

    @property
    def workers_lock(self) -> Path:
        """Shared by the workers."""
        return self.root / "workers.lock"


def arena_path(directory: Path, job: str, branch: str, checkpoints: str, host: str = "") -> Path:
    """Return the directory of a job's arena; `checkpoints` tells where its checkpoints go, and which run it is.

    `host`: what the launcher calls the host, where a machine is several.
    """
    # A dot separates the parts and occurs in none of them.
    place = hashlib.sha256(checkpoints.encode()).hexdigest()[:8]
    names = [safe_name(job), safe_name(branch), place, *([safe_name(host)] if host else [])]
    return directory / (_PREFIX + ".".join(names))


def find_arenas(directory: Path) -> list[Arena]:
    """Return the arenas of all jobs in a directory, as far as they are this user's alone; none where there is none."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    found = []
    for name in names:
        if name.startswith(_PREFIX):
            with suppress(CheckpointError):
                found.append(open_arena(directory / name))
    return found


def create_arena(path: Path) -> Arena:
    """Make an arena's directory, or open the one that is there. To stay in it, use `join_arena`.

    Raises: CheckpointError when it cannot be made or is not ours alone.
    """
    try:
        make_own_directory(path)
    except NotOwnError as error:
        raise _not_ours(error) from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: the arena cannot be made: {error.strerror}; name another checkpoint.arena_directory"
        ) from error
    return open_arena(path)


def open_arena(path: Path) -> Arena:
    """Return the arena in a directory that is ours alone.

    Raises: MissingFileError when it is not there; CheckpointError when somebody else may have been in it.
    """
    try:
        check_own_directory(path)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: there is no arena") from error
    except NotOwnError as error:
        raise _not_ours(error) from error
    except OSError as error:
        raise CheckpointError(f"{path}: the arena cannot be looked at: {error.strerror}") from error
    return Arena(path)


def _not_ours(error: NotOwnError) -> CheckpointError:
    return CheckpointError(
        f"{error.filename}: {error.strerror}; what is in it may be another's. Remove it, or name another "
        "checkpoint.arena_directory"
    )


def join_arena(path: Path) -> tuple[Arena, HeldLock]:
    """Enter an arena as a worker, making it when needed. It is not removed while the lock is held.

    Raises: CheckpointError as `create_arena` does.
    """
    for _ in range(_NUM_JOIN_ATTEMPTS):
        try:
            arena = create_arena(path)
            lock = hold_shared(arena.workers_lock)
            if lock is not None:
                create_wake(arena.wake)
                return arena, lock
        except MissingFileError:
            # Somebody removes the old arena just now.
            continue
    raise CheckpointError(f"{path}: the arena was removed {_NUM_JOIN_ATTEMPTS} times while it was made")


def remove_arena(path: Path, writer_lock: HeldLock | None = None) -> bool:
    """Remove an arena that no process uses, and say whether it is gone. A writer passes the lock that it holds.

    Raises: CheckpointError when it is not ours alone, or cannot be removed.
    """
    try:
        arena = open_arena(path)
    except MissingFileError:
        return True
    workers_lock = hold_alone(arena.workers_lock)
    if workers_lock is None:
        return not path.exists()
    with workers_lock:
        writer_lock = writer_lock or hold_alone(arena.writer_lock)
        if writer_lock is None:
            return False
        with writer_lock:
            _remove_content(arena)
    return True


def _remove_content(arena: Arena) -> None:
    try:
        for name in sorted(set(os.listdir(arena.root)) - {arena.writer_lock.name, arena.workers_lock.name}):
            (arena.root / name).unlink(missing_ok=True)
        # The workers' lock last: until it goes, whoever wants to join waits for us.
        arena.writer_lock.unlink(missing_ok=True)
        arena.workers_lock.unlink(missing_ok=True)
        try:
            arena.root.rmdir()
        except OSError as error:
            # Somebody joined in this moment, and the directory is theirs.
            if error.errno != errno.ENOTEMPTY:
                raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or arena.root}: cannot be removed: {error.strerror}") from error


def wake_writer(arena: Arena) -> bool:
    """Wake the arena's writer, and say whether there is one. Never waits and never raises."""
    return wake(arena.wake)


@dataclass(frozen=True, slots=True, order=True)
class SealedSnapshot:
    """A snapshot that all ranks agreed is whole. Only slots in which all three are the same are of one snapshot."""

    step: int
    round: int
    snapshot: int


def sealed_by_rank(arena: Arena, *, is_copy: bool = False) -> dict[int, list[SealedSnapshot]]:
    """Return the sealed snapshots in the slots of this host's ranks, or in the copies for others, oldest first.

    A slot that is damaged, being written or just removed has none.
    Raises: CheckpointError when the directory cannot be listed.
    """
    found: dict[int, list[SealedSnapshot]] = {}
    for file in arena.slots():
        if file.is_copy != is_copy:
            continue
        try:
            with SlotReader(file.path) as reader:
                header, words = reader.header, reader.words()
        except CheckpointError:
            continue
        if (header.rank, header.slot) == (file.rank, file.slot) and words.state == SlotState.SEALED:
            sealed = SealedSnapshot(words.step, words.round, words.snapshot)
            found[file.rank] = sorted([*found.get(file.rank, []), sealed])
    return found


def sealed_steps(arena: Arena, ranks: Sequence[int]) -> list[int]:
    """Return the steps whose snapshots all of `ranks`, those of this host, have sealed: ascending.

    Raises: CheckpointError when the directory cannot be listed.
    """
    by_rank = sealed_by_rank(arena)
    common = set(by_rank.get(ranks[0], []))
    for rank in ranks[1:]:
        common &= set(by_rank.get(rank, []))
    return sorted({snapshot.step for snapshot in common})
