"""A directory that appears complete or not at all: it is built under another name and then renamed.

The build works in a hidden staging directory next to the output, and holds the lock of a file in it. A killed process
leaves its staging directory behind, with the lock free. The next build of the same output removes the directory, or
takes it over: a build with a digest keeps files there, with which a build of the same digest continues.
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

# The entries of a staging directory. The lock file contains the build's digest.
_LOCK = "lock"
_NEW = "new"
_KEPT = "kept"
_REPLACED = "replaced"


@contextmanager
def new_directory(output: Path, file_names: Collection[str], is_forced: bool) -> Iterator[Path]:
    """Yield a directory to fill. It becomes `output` at the end of the block; an error removes it.

    `file_names` are all names that such a directory may contain. `is_forced` replaces a directory that contains only
    files with these names, and no other directory.

    Raises: DataError when `output` exists and must not be replaced, or cannot be written.
    """
    with resumable_directory(output, file_names, is_forced, "") as (new, _kept):
        yield new


@contextmanager
def resumable_directory(
    output: Path, file_names: Collection[str], is_forced: bool, digest: str
) -> Iterator[tuple[Path, Path]]:
    """Do as `new_directory`, and yield a second directory, for files with which a stopped build can be continued.

    A process that is killed in the block, or leaves it by a signal or a system error, keeps the second directory for
    the next build of this output with the same `digest`; with the digest "" it keeps nothing. A DataError in the block
    removes both.
    """
    remove_abandoned(output, digest)
    check_output(output, file_names, is_forced)
    with _staging(output, digest) as staging:
        try:
            yield staging / _NEW, staging / _KEPT
            check_output(output, file_names, is_forced)
            _publish(staging, output)
        except OSError as error:
            hint = "; the same command then continues the build" if any((staging / _KEPT).iterdir()) else ""
            raise _CannotWriteError(
                f"{output}: cannot be written: {error.strerror}; free some space or choose another --output{hint}"
            ) from error


class _CannotWriteError(DataError):
    """The output could not be written; the data are not at fault."""


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


def remove_abandoned(output: Path, digest: str = "") -> None:
    """Remove the staging directories of killed builds of `output`, except those that a build with `digest` can take
    over; running builds keep theirs."""
    for staging, lock in _abandoned(output):
        try:
            if (staging / _REPLACED).exists() and not output.exists():
                # The build was killed after it renamed the old output and before it renamed the new one.
                (staging / _REPLACED).rename(output)
            if not _can_continue(staging, digest):
                _remove(staging)
        except OSError:
            continue
        finally:
            os.close(lock)


def _abandoned(output: Path) -> Iterator[tuple[Path, int]]:
    """Lock and yield each staging directory of a killed build, with the lock's descriptor; the caller must close it."""
    name = re.compile(rf"\.{re.escape(output.name)}\.part-[0-9a-f]{{8}}")
    try:
        found = [Path(entry) for entry in os.scandir(output.parent) if name.fullmatch(entry.name)]
    except OSError:
        return  # creating the output will raise the error
    for staging in sorted(found):
        if staging.is_symlink() or not staging.is_dir():
            continue
        try:
            lock = os.open(staging / _LOCK, os.O_RDWR)
        except FileNotFoundError:
            with suppress(OSError):  # the build was killed before it created the lock file, so the directory is empty
                staging.rmdir()
            continue
        except OSError:
            continue  # it belongs to another user
        try:
            is_ours = not file_locks.lock(lock)  # without locks, it is unknown whether the build is running
        except OSError:
            is_ours = False  # the build is running
        if is_ours:
            yield staging, lock
        else:
            os.close(lock)


def _can_continue(staging: Path, digest: str) -> bool:
    try:
        return bool(digest) and (staging / _LOCK).read_text() == digest and any((staging / _KEPT).iterdir())
    except (OSError, ValueError):
        return False


@contextmanager
def _staging(output: Path, digest: str) -> Iterator[Path]:
    """Make a locked staging directory, or take one over, with an empty directory `new` in it; remove it at the end."""
    staging, lock = output, -1
    is_left = False
    try:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            staging, lock = _taken_over(output, digest)
            while lock < 0:
                staging = output.parent / f".{output.name}.part-{secrets.token_hex(4)}"
                lock = _make_locked(staging)
                if lock >= 0:
                    os.write(lock, digest.encode())
            shutil.rmtree(staging / _NEW, ignore_errors=True)
            (staging / _NEW).mkdir()
            (staging / _KEPT).mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(f"{output}: cannot be created: {error.strerror}; choose another --output") from error
        yield staging
    except BaseException as error:
        is_data = isinstance(error, DataError) and not isinstance(error, _CannotWriteError)
        is_left = not is_data and _can_continue(staging, digest)
        raise
    finally:
        if is_left:
            shutil.rmtree(staging / _NEW, ignore_errors=True)
        elif staging != output:
            # This removes the half-built directory after a failure, and the replaced directory after an exchange.
            _remove(staging)
        if lock >= 0:
            os.close(lock)


def _taken_over(output: Path, digest: str) -> tuple[Path, int]:
    """Return the staging directory of a killed build with the same digest and its lock's descriptor, or -1."""
    for staging, lock in _abandoned(output):
        if _can_continue(staging, digest):
            return staging, lock
        os.close(lock)
    return output, -1


def _make_locked(staging: Path) -> int:
    """Make a staging directory. Return its lock's descriptor, or -1 if another build has removed the directory."""
    staging.mkdir()
    try:
        lock = os.open(staging / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return -1
    is_taken = False
    try:
        file_locks.lock(lock)  # without locks, no build treats the directory as abandoned
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
    """Remove a staging directory, the lock last, so that another build still recognizes a partly removed directory."""
    for name in (_NEW, _KEPT, _REPLACED):
        shutil.rmtree(staging / name, ignore_errors=True)
    shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, output: Path) -> None:
    new, replaced = staging / _NEW, staging / _REPLACED
    if not output.exists() or not any(output.iterdir()):
        new.rename(output)  # POSIX replaces an empty directory too
    elif not _exchange(new, output):
        # Without an atomic exchange there is a moment without an output; after a failure, the old output is restored.
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
