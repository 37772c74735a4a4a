"""File locks and names that only one process can claim, on file systems that may lack both.

Some parallel file systems are mounted without locks, and mounts of object storage have no hard links. A program that
needs a lock or a link there mostly continues without it, and reports that nothing keeps another process out. The arena
refuses a file system without locks: no process could detect whether a writer or workers use the arena.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

# EINVAL: the arguments of these calls are always valid, so the file system lacks the call
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})


def lock(file: int) -> str:
    """Lock an open file exclusively, without waiting, until its descriptors are closed.

    Returns "", or the system's error if the file system has no locks.
    Raises: BlockingIOError when another process has it; OSError for any other failure.
    """
    return _locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def wait_and_lock(file: int) -> str:
    """Do as `lock` does, but wait while another process has it."""
    return _locked(file, fcntl.LOCK_EX)


def wait_and_share(file: int) -> str:
    """Do as `wait_and_lock` does, but share the lock with the processes that share it too."""
    return _locked(file, fcntl.LOCK_SH)


def wait_and_lock_byte(file: int, place: int) -> None:
    """Lock one byte of an open file exclusively until its descriptors are closed. The byte need not exist.

    Other bytes stay free. The lock excludes every other open file, also one that the same process has opened.
    Raises: OSError, also when the file system has no such locks.
    """
    # struct flock of 64-bit Linux: type, whence, start, length, process
    fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))


def is_locked(file: int) -> bool | None:
    """Return whether a process has an exclusive lock on an open file; None where the file system has no locks.

    Raises: OSError.
    """
    try:
        return None if _locked(file, fcntl.LOCK_SH | fcntl.LOCK_NB) else False
    except BlockingIOError:
        return True


def without_lock(path: Path, problem: str, risk: str) -> str:
    """Return the warning about a file that cannot be locked. `risk`: what can happen without the lock."""
    return f"{path} cannot be locked ({problem}): the file system has no locks, so nothing keeps {risk}"


def give_name(temporary: Path, path: Path) -> bool:
    """Give a complete file its name, if that is free. The temporary name may remain; the caller must remove it.

    Without hard links, the file is renamed if the name is free; of two processes at the same time, the last one wins.
    Returns whether the name was free. Raises: OSError.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            return False
        temporary.replace(path)
    return True


def _locked(file: int, operation: int) -> str:
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return os.strerror(error.errno or 0)
    return ""
