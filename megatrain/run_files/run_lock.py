"""The right to write to a run directory: a file lock selects one job, a chain of claims (claims.py) one round of it.

The lock excludes other jobs, and is released when its process exits. It cannot exclude an older round of the same job:
a frozen host keeps the lock, and a host that is cut off may lose it while it writes. So a round of a launcher claims
the directory by its number. The newer round takes over regardless of the lock; the older one finds the newer claim
before its next write, and stops.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from megatrain.checkpoint_format.claims import Claim, Claims, JobRound, signature
from megatrain.checkpoint_format.lineage import LOCK_NAME
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.contracts.errors import CheckpointError, ConfigError, FencedError
from megatrain.contracts.files import file_locks

LOCK_FILE = "lock"
UNKNOWN_HOLDER = "another process"
_NUM_LOCK_TRIES = 3
_TRY_AGAIN_S = 0.002


class NotOpenedError(Exception):
    """A lock file cannot be opened."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason


class FileLock:
    """An open lock file. `note`: a message for the log, such as that the file system has no locks; else empty."""

    def __init__(self, path: Path, file: FileIO, own: str) -> None:
        self._path = path
        self._file = file
        self._own = own
        self._is_locked = False
        self.note = ""

    def holder(self) -> str:
        """Return the last signature."""
        return self._path.read_text(errors="replace").strip() or UNKNOWN_HOLDER

    def take(self, num_tries: int = 1) -> None:
        """Lock and sign the file, if the file system has locks; else set `note`.

        num_tries: how often to try while another process has the lock.
        Raises: BlockingIOError when another process has it; OSError.
        """
        for left in reversed(range(num_tries)):
            try:
                problem = file_locks.lock(self._file.fileno())
                break
            except BlockingIOError:
                if not left:
                    raise
            time.sleep(_TRY_AGAIN_S)  # a process that checks the lock holds it for a moment
        if problem:
            risk = "another job out of this directory; make sure that only one job has it"
            self.note = f"WARNING: {file_locks.without_lock(self._path, problem, risk)}"
        else:
            self._is_locked = True
            self.sign()

    def take_if_free(self) -> None:
        """Lock the file if it is not locked yet: its frozen holder may have exited since the last attempt."""
        if not self._is_locked:
            with suppress(OSError):  # the holder has not ended, or there are no locks here
                self.take()

    def sign(self) -> None:
        """Write this process's signature. Only messages use it, so errors such as a full disk are ignored."""
        with suppress(OSError):
            self._file.truncate(0)
            self._file.write(f"{self._own}\n".encode())


@dataclass(frozen=True, slots=True)
class RunLock:
    """This process's exclusive right to write to a run directory."""

    lock: FileLock
    claim: tuple[Claims, Claim] | None

    def check(self) -> None:
        """Check that no newer round has taken over. Called before each write; costs one lookup in the directory.

        If the claims cannot be looked up, the write will fail too and report that.
        Raises: FencedError naming the new holder.
        """
        if self.claim is None:
            return
        claims, own = self.claim
        with suppress(CheckpointError):
            if claims.is_overtaken(own.number):
                taker = claims.newest() or own
                raise FencedError(
                    f"{claims.location_of(taker.number)}: {taker.holder} writes to the run now; {own.holder} is"
                    " left over and must stop"
                )
        self.lock.take_if_free()


def claim_run(root: Path, key: str, job_round: JobRound) -> tuple[Claims, Claim]:
    """Take over a run directory for a round from all older rounds. `key` names the directory in messages.

    Raises: FencedError when a newer round has it; ConfigError when no claim can be written.
    """
    claims = Claims(LocalLocation(root))
    try:
        return claims, claims.take(job_round)
    except CheckpointError as error:
        raise ConfigError([f"{key}: {error}; name a directory that can be written"]) from error


@contextmanager
def checkpoints_locked(directory: str, job_round: JobRound | None = None) -> Iterator[FileLock | None]:
    """Keep every other run from saving in a checkpoint.directory, as far as its file system has locks.

    A URL is not locked. Other code reports errors of the storage.
    Raises: as `locked_file` does.
    """
    path = Path(directory)
    if not directory or "://" in directory:
        yield None
        return
    with ExitStack() as stack:
        lock = None
        with suppress(NotOpenedError, OSError):
            path.mkdir(parents=True, exist_ok=True)
            key = f"checkpoint.directory={directory!r}"
            lock = stack.enter_context(locked_file(path / LOCK_NAME, key, "checkpoint.directory", job_round))
            lock.sign()
        yield lock


@contextmanager
def locked_file(path: Path, key: str, setting: str, job_round: JobRound | None) -> Iterator[FileLock]:
    """Lock a file that no other job has locked; an older round of the same job may still have it locked.

    Raises: NotOpenedError; when another job has the lock, ConfigError, or FencedError under a launcher.
    """
    try:
        opened = path.open("a+b", buffering=0)
    except OSError as error:
        raise NotOpenedError(path, error.strerror or str(error)) from error
    with opened as file:
        lock = FileLock(path, file, signature(job_round))
        try:
            lock.take(_NUM_LOCK_TRIES)
        except BlockingIOError:
            _check_holder(lock, key, setting, job_round)
        yield lock


def _check_holder(lock: FileLock, key: str, setting: str, job_round: JobRound | None) -> None:
    """Continue without the lock if an older round of this job has it. Raises: ConfigError, FencedError."""
    holder = lock.holder()
    if job_round is not None and holder.endswith(f" of {job_round.counter}"):
        lock.note = f"{key}: {holder} is frozen or cut off and still has the lock; this round takes over"
        return
    problem = f"{key}: {holder} is training in it; wait for it or stop it, or name another {setting}"
    raise ConfigError([problem]) if job_round is None else FencedError(problem)
