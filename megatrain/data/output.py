"""A directory that appears complete or not at all: it is built under another name and then renamed.

The build works in a hidden staging directory next to the output, with a lock file that the building process holds. A
killed process leaves its staging directory behind without a held lock, and the next build of the same output removes
it.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.contracts.errors import DataError
from megatrain.contracts.files import file_locks

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

# The entries of a staging directory.
_LOCK = "lock"
_NEW = "new"
_REPLACED = "replaced"


@contextmanager
def new_directory(output: Path, file_names: Collection[str], is_forced: bool) -> Iterator[Path]:
    """Yield a directory to fill. It becomes `output` at the end of the block; an error removes it.

    `file_names` are all names that such a directory may contain. `is_forced` replaces a directory that contains only
    those, and no other directory.

    Raises: DataError when `output` is taken or cannot be written.
    """
    remove_abandoned(output)
    check_output(output, file_names, is_forced)
    with _staging(output) as staging:
        try:
            yield staging / _NEW
            check_output(output, file_names, is_forced)
            _publish(staging, output)
        except OSError as error:
            raise DataError(
                f"{output}: cannot be written: {error.strerror}; free some space or choose another --output"
            ) from error


def check_output(output: Path, file_names: Collection[str], is_forced: bool) -> None:
    """Refuse an output that may not be replaced, before any work is done.

    Raises: DataError when `output` exists and is not an empty directory, unless `is_forced` is set and it contains only
    `file_names`.
    """
    if not (output.exists() or output.is_symlink()):
        return
    if output.is_symlink() or not output.is_dir():
        raise DataError(f"{output}: exists and is not a directory; choose another --output")
    names = {path.name for path in output.iterdir()}
    foreign = sorted(names - set(file_names))
    if foreign:
        raise DataError(
            f"{output}: holds {foreign[0]}, which is not the output of a data build; choose another --output"
        )
    if names and not is_forced:
        raise DataError(f"{output}: already holds a data set; choose another --output or replace it with --force")


def remove_abandoned(output: Path) -> None:
    """Remove the staging directories of killed builds of `output`; running builds keep theirs."""
    name = re.compile(rf"\.{re.escape(output.name)}\.part-[0-9a-f]{{8}}")
    try:
        found = [Path(entry) for entry in os.scandir(output.parent) if name.fullmatch(entry.name)]
    except OSError:
        return  # making the output in this place will raise the error
    for staging in found:
        if staging.is_symlink() or not staging.is_dir():
            continue
        try:
            lock = os.open(staging / _LOCK, os.O_RDWR)
        except FileNotFoundError:
            with suppress(OSError):  # the build was killed before it made the lock, so the directory is empty
                staging.rmdir()
        except OSError:
            continue  # it belongs to another user
        else:
            _remove_if_unlocked(staging, lock, output)


def _remove_if_unlocked(staging: Path, lock: int, output: Path) -> None:
    try:
        if file_locks.lock(lock):
            return  # the file system has no locks, and whether the build is running is unknown
        if (staging / _REPLACED).exists() and not output.exists():
            # The build was killed after it moved the old output away and before the new output had its name.
            (staging / _REPLACED).rename(output)
        _remove(staging)
    except OSError:
        return  # the build is running
    finally:
        os.close(lock)


@contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """Make a locked staging directory with an empty directory in it; remove both at the end of the block."""
    staging, lock = output, -1
    try:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            while lock < 0:
                staging = output.parent / f".{output.name}.part-{secrets.token_hex(4)}"
                lock = _make_locked(staging)
            (staging / _NEW).mkdir()
        except OSError as error:
            raise DataError(f"{output}: cannot be created: {error.strerror}; choose another --output") from error
        yield staging
    finally:
        if staging != output:
            # This removes the half-built directory after a failure, and the replaced directory after an exchange.
            _remove(staging)
        if lock >= 0:
            os.close(lock)


def _make_locked(staging: Path) -> int:
    """Make a staging directory. Return the descriptor that holds its lock, or -1 if another build has removed the
    directory as abandoned in the meantime."""
    staging.mkdir()
    try:
        lock = os.open(staging / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return -1
    is_taken = False
    try:
        file_locks.lock(lock)  # on a file system without locks no build treats the directory as abandoned
    except BlockingIOError:
        is_taken = True
    except OSError:
        os.close(lock)
        raise
    if is_taken or not (staging / _LOCK).exists():
        os.close(lock)
        return -1
    return lock


def _remove(staging: Path) -> None:
    """Remove a staging directory, the lock last: so a partly removed directory still differs from a running build."""
    for name in (_NEW, _REPLACED):
        shutil.rmtree(staging / name, ignore_errors=True)
    shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, output: Path) -> None:
    new, replaced = staging / _NEW, staging / _REPLACED
    if not output.exists() or not any(output.iterdir()):
        new.rename(output)  # POSIX replaces an empty directory too
    elif not _exchange(new, output):
        # Without an atomic exchange there is a moment in which neither exists; a failure puts the old output back.
        try:
            output.rename(replaced)
            new.rename(output)
        finally:
            if replaced.exists() and not output.exists():
                replaced.rename(output)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories atomically, if kernel, libc and file system support it; return whether they were swapped."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)
