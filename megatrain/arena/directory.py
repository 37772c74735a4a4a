"""The directory of an arena, on tmpfs: its file names, and how processes create, enter and remove it.

Workers write slots (slot_layout.py) and plans (plans.py) into it, one writer process copies the slots to storage, and a
launcher may read it. /dev/shm is world-writable, so an arena is used only if no other user can write to its directory:
then no other user can have put a file or a link into it. Each worker, and the writer process, holds one of the arena's
two locks (locks.py), and only a process that holds both removes the arena. This module defines the names of all files
in an arena.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.arena.locks import HeldLock, create_wake, hold_exclusively, hold_shared, wake
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.files.own_files import NotOwnError, check_own_directory, make_own_directory
from megatrain.run_files.run_directory import safe_name

_SLOT_NAME = re.compile(r"(rank|copy)-([0-9]{5,})\.slot-([0-9])")
_PREFIX = "megatrain-arena1."
_LOADER_PREFIX = "loader-r"
_LOADER_NAME = re.compile(rf"{_LOADER_PREFIX}([0-9]{{6,}})\.")
_NUM_JOIN_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class SlotFile:
    """A slot as its file name describes it. A copy came from the host of `rank`."""

    path: Path
    rank: int
    slot: int
    is_copy: bool


@dataclass(frozen=True, slots=True)
class Arena:
    """The file names in an arena's directory."""

    root: Path

    def slot(self, rank: int, slot: int) -> Path:
        return self.root / f"rank-{rank:05d}.slot-{slot}"

    def copy(self, rank: int, slot: int) -> Path:
        """This host's copy of a slot of another host's rank."""
        return self.root / f"copy-{rank:05d}.slot-{slot}"

    def slots(self) -> list[SlotFile]:
        """Return the existing slots and copies.

        Raises: CheckpointError when the directory cannot be listed; MissingFileError when it does not exist.
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
        """The `.metadata` of the checkpoints of a round, in the arena of the host of rank 0."""
        return self.root / f"metadata-r{round_number:06d}.bin"

    def index(self, round_number: int) -> Path:
        """The index of the checkpoints of a round, in the arena of the host of rank 0."""
        return self.root / f"index-r{round_number:06d}.json"

    def loader_ring(self, round_number: int) -> Path:
        """The batches that the data loader of a round has read for the ranks of this host."""
        return self.root / f"{_LOADER_PREFIX}{round_number:06d}.ring"

    def loader_plan(self, round_number: int) -> Path:
        """The file with the plan of a round's data loader."""
        return self.root / f"{_LOADER_PREFIX}{round_number:06d}.json"

    def loader_lock(self, round_number: int) -> Path:
        """The lock that the data loader of a round holds exclusively."""
        return self.root / f"{_LOADER_PREFIX}{round_number:06d}.lock"

    def loader_wake(self, round_number: int) -> Path:
        """The FIFO that wakes the data loader of a round."""
        return self.root / f"{_LOADER_PREFIX}{round_number:06d}.wake"

    def loader_reader_wake(self, round_number: int, reader: int) -> Path:
        """The FIFO that wakes a rank that waits for the data loader. `reader`: the rank's index on its host."""
        return self.root / f"{_LOADER_PREFIX}{round_number:06d}.wake-{reader:05d}"

    def loader_producers(self, round_number: int) -> Path:
        """The producers of pictures that the processes of this host ask in a round."""
        return self.root / f"{_LOADER_PREFIX}{round_number:06d}.producers"

    def remove_loader_files(self, last_round: int) -> None:
        """Remove the files of the data loaders of rounds up to this one. A process keeps what it has mapped.

        Raises: CheckpointError naming a file that cannot be removed.
        """
        for path in sorted(self.root.glob(f"{_LOADER_PREFIX}*")):
            found = _LOADER_NAME.match(path.name)
            if found is None or int(found[1]) > last_round:
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be removed: {error.strerror}") from error

    @property
    def writer_status(self) -> Path:
        return self.root / "status.json"

    @property
    def wake(self) -> Path:
        return self.root / "wake"

    @property
    def writer_lock(self) -> Path:
        """The lock that the writer process holds exclusively."""
        return self.root / "writer.lock"

    @property
    def workers_lock(self) -> Path:
        """The lock that each worker holds in shared mode."""
        return self.root / "workers.lock"


def arena_path(directory: Path, job: str, branch: str, checkpoints: str, host: str = "") -> Path:
    """Return the directory of a job's arena. `checkpoints` identifies the location of its checkpoints and the run.

    `host`: the launcher's name for the host, when one machine acts as several hosts.
    """
    # A dot separates the parts and occurs in none of them.
    location = hashlib.sha256(checkpoints.encode()).hexdigest()[:8]
    names = [safe_name(job), safe_name(branch), location, *([safe_name(host)] if host else [])]
    return directory / (_PREFIX + ".".join(names))


def find_arenas(directory: Path) -> list[Arena]:
    """Return this user's arenas of all jobs in a directory. Empty when the directory cannot be listed."""
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
    """Create an arena's directory, or open an existing one. This takes no lock; `join_arena` does.

    Raises: CheckpointError when it cannot be created, or when another user may write to it.
    """
    try:
        make_own_directory(path)
    except NotOwnError as error:
        raise _not_own(error) from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: the arena cannot be created: {error.strerror}; name another checkpoint.arena_directory"
        ) from error
    return open_arena(path)


def open_arena(path: Path) -> Arena:
    """Return the arena in an existing directory that only this user can write to.

    Raises: MissingFileError when it does not exist; CheckpointError when another user may have written to it.
    """
    try:
        check_own_directory(path)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: there is no arena") from error
    except NotOwnError as error:
        raise _not_own(error) from error
    except OSError as error:
        raise CheckpointError(f"{path}: the arena cannot be accessed: {error.strerror}") from error
    return Arena(path)


def _not_own(error: NotOwnError) -> CheckpointError:
    return CheckpointError(
        f"{error.filename}: {error.strerror}; its content may belong to another user. Remove it, or name another "
        "checkpoint.arena_directory"
    )


def join_arena(path: Path) -> tuple[Arena, HeldLock]:
    """Enter an arena as a worker; create it if necessary. No process removes the arena while the lock is held.

    Raises: CheckpointError as `create_arena`, `hold_shared` and `create_wake` do.
    """
    for _ in range(_NUM_JOIN_ATTEMPTS):
        try:
            arena = create_arena(path)
            lock = hold_shared(arena.workers_lock)
            if lock is not None:
                create_wake(arena.wake)
                return arena, lock
        except MissingFileError:
            # Another process is removing the old arena.
            continue
    raise CheckpointError(f"{path}: the arena was removed {_NUM_JOIN_ATTEMPTS} times while it was being created")


def remove_arena(path: Path, writer_lock: HeldLock | None = None) -> bool:
    """Remove an arena that no process uses. Returns whether it is gone.

    writer_lock: the writer's lock, if the caller is the writer and holds it already.
    Raises: CheckpointError when another user may write to it, when a lock cannot be taken, or when a file cannot be
    removed.
    """
    try:
        arena = open_arena(path)
    except MissingFileError:
        return True
    workers_lock = hold_exclusively(arena.workers_lock)
    if workers_lock is None:
        return not path.exists()
    with workers_lock:
        writer_lock = writer_lock or hold_exclusively(arena.writer_lock)
        if writer_lock is None:
            return False
        with writer_lock:
            _remove_content(arena)
    return True


def _remove_content(arena: Arena) -> None:
    try:
        for name in sorted(set(os.listdir(arena.root)) - {arena.writer_lock.name, arena.workers_lock.name}):
            (arena.root / name).unlink(missing_ok=True)
        # Remove the workers' lock last: while its file exists, a process that joins waits for this process.
        arena.writer_lock.unlink(missing_ok=True)
        arena.workers_lock.unlink(missing_ok=True)
        try:
            arena.root.rmdir()
        except OSError as error:
            # Another process joined in the meantime and uses the directory now.
            if error.errno != errno.ENOTEMPTY:
                raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or arena.root}: cannot be removed: {error.strerror}") from error


def wake_writer(arena: Arena) -> bool:
    """Wake the arena's writer. Returns whether there is one. Never waits and never raises."""
    return wake(arena.wake)
