"""A directory that appears complete or not at all: built beside its place under another name, then renamed."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.contracts.errors import DataError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def new_directory(output: Path, file_names: Collection[str], is_forced: bool) -> Iterator[Path]:
    """Give a directory to fill, which becomes `output` at the end of the block and is removed on an error.

    `file_names` are all that such a directory may hold: `is_forced` replaces a directory of only those, nothing else.

    Raises: DataError when `output` is taken or cannot be written.
    """
    check_output(output, file_names, is_forced)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = output.parent / f".{output.name}.part-{secrets.token_hex(4)}"
        staging.mkdir()
    except OSError as error:
        raise DataError(f"{output}: cannot be made: {error.strerror}; choose another --output") from error
    try:
        yield staging
        check_output(output, file_names, is_forced)
        _publish(staging, output)
    except OSError as error:
        raise DataError(
            f"{output}: cannot be written: {error.strerror}; make room or choose another --output"
        ) from error
    finally:
        # After a failure the half-built directory, after an exchange the one that was replaced.
        shutil.rmtree(staging, ignore_errors=True)


def check_output(output: Path, file_names: Collection[str], is_forced: bool) -> None:
    """Refuse, before any work, an output that may not be replaced.

    Raises: DataError when `output` exists and is not an empty directory, unless `is_forced` and it is our own kind.
    """
    if not (output.exists() or output.is_symlink()):
        return
    if output.is_symlink() or not output.is_dir():
        raise DataError(f"{output}: exists and is no directory; choose another --output")
    names = {path.name for path in output.iterdir()}
    foreign = sorted(names - set(file_names))
    if foreign:
        raise DataError(f"{output}: holds {foreign[0]}, which no data build made; choose another --output")
    if names and not is_forced:
        raise DataError(f"{output}: already holds a data set; choose another --output or replace it with --force")


def _publish(staging: Path, output: Path) -> None:
    if not output.exists() or not any(output.iterdir()):
        staging.rename(output)  # POSIX replaces an empty directory too
    elif not _exchange(staging, output):
        # Without an atomic exchange there is an instant in which neither exists; a failure puts the old one back.
        retired = Path(f"{staging}-old")
        output.rename(retired)
        try:
            staging.rename(output)
        except OSError:
            retired.rename(output)
            raise
        shutil.rmtree(retired)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step where kernel, libc and file system can; return whether it was done."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)
