"""The users of an arena: its workers share one lock, its writer process has another, and workers wake the writer.

The locks are flock()s, which the kernel releases when a process dies for any reason. To check whether a lock is held, a
process takes it for a moment. So a process that finds a lock taken retries for as long as such a check may last. A lock
file may be removed together with its arena while another process waits for the lock. So a lock counts only if its path
still refers to the locked file.
"""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.files import file_locks

_TRY_AGAIN_S = 0.002
"""A check holds the lock for microseconds, so this is long enough."""
_NUM_TRIES_TO_CHECK = 3
_NUM_TRIES_TO_HOLD = 25
_DRAIN_BYTES = 4096


class HeldLock:
    """A lock that this process holds until `release`, or until it exits. Forked children share it until they exec."""

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        self._file = file

    def fileno(self) -> int:
        """Return the lock's descriptor. A child process that inherits it has the lock too, until it exits."""
        return self._file

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def hold_shared(path: Path) -> HeldLock | None:
    """Wait for an exclusive holder and take a lock in shared mode; None when its file or directory was removed.

    Raises: CheckpointError naming the file.
    """
    file = _open(path, os.O_CREAT)
    if file is None:
        return None
    _take(path, file, file_locks.wait_and_share)
    return _held_if_in_place(path, file)


def hold_exclusively(path: Path) -> HeldLock | None:
    """Take a lock exclusively; None when another process has it, or when its file or directory was removed.

    Raises: CheckpointError naming the file.
    """
    file = _open(path, os.O_CREAT)
    if file is None or not _lock_exclusively(path, file, _NUM_TRIES_TO_HOLD):
        return None
    return _held_if_in_place(path, file)


def is_held(path: Path) -> bool:
    """Return whether any process, this one included, has the lock. A lock without a file is free.

    Raises: CheckpointError naming the file.
    """
    file = _open(path, 0)
    if file is None:
        return False
    if _lock_exclusively(path, file, _NUM_TRIES_TO_CHECK):
        os.close(file)
        return False
    return True


def _open(path: Path, flags: int) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: the lock cannot be opened: {error.strerror}") from error


def _lock_exclusively(path: Path, file: int, num_tries: int) -> bool:
    """Try to take an open file's lock exclusively. Closes the file when another process has the lock."""
    for attempt in range(num_tries):
        if attempt:
            time.sleep(_TRY_AGAIN_S)
        try:
            _take(path, file, file_locks.lock)
        except BlockingIOError:
            continue
        return True
    os.close(file)
    return False


def _take(path: Path, file: int, take: Callable[[int], str]) -> None:
    """Take a lock. Raises: BlockingIOError when another process has it. On any other failure, this function closes the
    file and raises CheckpointError.

    Without locks, no process could detect whether a writer or workers use the arena: two writers would write the same
    checkpoint, and the writer would remove the snapshots of running workers. So an arena needs locks.
    """
    try:
        problem = take(file)
    except BlockingIOError:
        raise
    except OSError as error:
        os.close(file)
        raise CheckpointError(f"{path}: the lock cannot be taken: {error.strerror}") from error
    if problem:
        os.close(file)
        raise CheckpointError(
            f"{path} cannot be locked ({problem}): the file system has no file locks, and the processes that share an "
            "arena need them; name another checkpoint.arena_directory, such as /dev/shm"
        )


def _held_if_in_place(path: Path, file: int) -> HeldLock | None:
    with suppress(FileNotFoundError):  # its holder removed it
        if os.path.samestat(os.fstat(file), os.lstat(path)):
            return HeldLock(path, file)
    os.close(file)
    return None


def create_wake(path: Path) -> None:
    """Create a FIFO that wakes the process that reads it, unless the FIFO exists.

    Raises: CheckpointError naming it.
    """
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        if not stat.S_ISFIFO(os.lstat(path).st_mode):
            raise CheckpointError(f"{path}: is not a FIFO; the arena is damaged, remove its directory") from None
    except OSError as error:
        raise CheckpointError(f"{path}: the FIFO cannot be created: {error.strerror}") from error


def wake(path: Path) -> bool:
    """Wake the process that reads the FIFO. Returns whether there is one. Never waits and never raises."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not stat.S_ISFIFO(os.fstat(file).st_mode):
            return False
        os.write(file, b"\0")
    except BlockingIOError:
        # Full: enough wake-ups are pending.
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return True


class WakeReader(Closable):
    """The end of a FIFO at which a process waits to be woken.

    Raises: CheckpointError when the FIFO cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            # Open for writing too: if no process has the FIFO open for writing, it is at its end, and poll never waits.
            self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise CheckpointError(f"{path}: the FIFO cannot be opened: {error.strerror}") from error
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a wake-up or the timeout. Returns whether there was a wake-up."""
        if not self._poll.poll(timeout_s * 1000):
            return False
        while True:
            try:
                if len(os.read(self._file, _DRAIN_BYTES)) < _DRAIN_BYTES:
                    return True
            except BlockingIOError:
                return True

    def close(self) -> None:
        if self._file >= 0:
            self._poll.unregister(self._file)
            os.close(self._file)
            self._file = -1
