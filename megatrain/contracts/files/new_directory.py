"""A directory that appears complete or not at all: it is built under another name and then renamed.

A build works in a hidden staging directory next to the output, and holds the lock of a file in it. A killed process
leaves its staging directory behind, with the lock free. The next build of the same output removes the directory, or
takes it over: a build with a digest keeps files there, with which a build of the same digest continues.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.errors import MegatrainError
from megatrain.contracts.files import file_locks
from megatrain.contracts.files.whole_files import sync_directory, sync_file

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

# The entries of a staging directory. The lock file contains the build's digest.
_LOCK = "lock"
_NEW = "new"
_KEPT = "kept"
_REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class DirectoryKind:
    """A kind of directory that a program writes.

    has_name: returns whether such a directory may contain a file of the given name. content, writer, hint: for errors,
    as in "a data set", "a data build" and "choose another --output". error: raised when a directory must not be
    replaced. write_error: raised when it cannot be written.
    """

    has_name: Callable[[str], object]
    content: str
    writer: str
    hint: str
    error: type[MegatrainError]
    write_error: type[MegatrainError]


@contextmanager
def new_directory(output: Path, kind: DirectoryKind, is_forced: bool) -> Iterator[Path]:
    """Yield a directory to fill. It becomes `output` at the end of the block; an error removes it.

    `is_forced` replaces a directory that contains only files of this kind, and no other directory.
    Raises: the errors of `kind` when `output` exists and must not be replaced, or cannot be written.
    """
    with resumable_directory(output, kind, is_forced, "") as (new, _kept):
        yield new


@contextmanager
def resumable_directory(output: Path, kind: DirectoryKind, is_forced: bool, digest: str) -> Iterator[tuple[Path, Path]]:
    """Do as `new_directory`, and yield a second directory, for files with which a stopped build can be continued.

    A process that is killed in the block, or leaves it by a signal or a system error, keeps the second directory for
    the next build of this output with the same `digest`; with the digest "" it keeps nothing. `kind.error` in the block
    removes both.
    """
    remove_abandoned(output, digest)
    _check_output(output, kind, is_forced)
    kept = None
    try:
        with _staging(output, kind, digest) as staging:
            kept = staging / _KEPT
            yield staging / _NEW, kept
            _sync(staging / _NEW)
            _check_output(output, kind, is_forced)
            _publish(staging, output)
    except OSError as error:
        hint = "; the same command then continues the build" if kept is not None and kept.exists() else ""
        raise kind.write_error(
            f"{output}: cannot be written: {error.strerror}; free some space or {kind.hint}{hint}"
        ) from error
    try:
        sync_directory(output.parent)
    except OSError as error:
        raise kind.write_error(
            f"{output}: is complete, but a loss of power may undo it: {output.parent} cannot be synced:"
            f" {error.strerror}; check the file system, then verify the output or write it again"
        ) from error


def _check_output(output: Path, kind: DirectoryKind, is_forced: bool) -> None:
    """Refuse an output that may not be replaced, before any work is done and again before it is replaced."""
    if not (output.exists() or output.is_symlink()):
        return
    if output.is_symlink() or not output.is_dir():
        raise kind.error(f"{output}: exists and is not a directory; {kind.hint}")
    names = sorted(path.name for path in output.iterdir())
    foreign = next((name for name in names if not kind.has_name(name)), None)
    if foreign is not None:
        raise kind.error(f"{output}: holds {foreign}, which is not the output of {kind.writer}; {kind.hint}")
    if names and not is_forced:
        raise kind.error(f"{output}: already holds {kind.content}; {kind.hint} or replace it with --force")


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
def _staging(output: Path, kind: DirectoryKind, digest: str) -> Iterator[Path]:
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
            raise kind.write_error(f"{output}: cannot be created: {error.strerror}; {kind.hint}") from error
        yield staging
    except BaseException as error:
        is_left = not isinstance(error, kind.error) and _can_continue(staging, digest)
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
    """Return the staging directory of a killed build with the same digest, and its lock's descriptor; without one,
    `output` and -1."""
    for staging, lock in _abandoned(output):
        if _can_continue(staging, digest):
            return staging, lock
        os.close(lock)
    return output, -1


def _make_locked(staging: Path) -> int:
    """Make a staging directory. Return its lock's descriptor, or -1 if another build has taken or removed it."""
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


def _sync(directory: Path) -> None:
    """Make a directory of files durable. Raises: OSError."""
    for path in directory.iterdir():
        sync_file(path)
    sync_directory(directory)


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
