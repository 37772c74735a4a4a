"""The output directory of an export, which appears when all its files are on disk, or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.contracts.errors import CheckpointError, SaveError

_OWN_FILES = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer\.model|tokenizer_config\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)


@contextmanager
def new_model_directory(output: Path, *, is_forced: bool) -> Iterator[Path]:
    """Yield a directory to fill. At the end of the block it becomes `output`; on an error it is removed.

    is_forced: replace an existing directory if it holds only files that an export writes.
    Raises: CheckpointError when `output` exists and must not be replaced; SaveError when it cannot be written.
    """
    _check_output(output, is_forced)
    staging = output.parent / f".{output.name}.part-{secrets.token_hex(4)}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        for path in (*staging.iterdir(), staging):
            _sync(path)
        _check_output(output, is_forced)
        _publish(staging, output)
        _sync(output.parent)
    except OSError as error:
        raise SaveError(
            f"{output}: cannot be written: {error.strerror}; free some space or choose another directory"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_output(output: Path, is_forced: bool) -> None:
    if not (output.exists() or output.is_symlink()):
        return
    if output.is_symlink() or not output.is_dir():
        raise CheckpointError(f"{output}: exists and is not a directory; choose another")
    names = sorted(path.name for path in output.iterdir())
    foreign = [name for name in names if not _OWN_FILES.fullmatch(name)]
    if foreign:
        raise CheckpointError(
            f"{output}: holds {foreign[0]}, which is not the output of an export; choose another directory"
        )
    if names and not is_forced:
        raise CheckpointError(f"{output}: already holds a model; choose another directory or replace it with --force")


def _publish(staging: Path, output: Path) -> None:
    if not output.exists() or not any(output.iterdir()):
        staging.rename(output)  # POSIX replaces an empty directory too
        return
    # Two renames: for an instant `output` does not exist, but it is never incomplete. A failure restores the old
    # directory.
    retired = Path(f"{staging}-old")
    output.rename(retired)
    try:
        staging.rename(output)
    except OSError:
        retired.rename(output)
        raise
    shutil.rmtree(retired)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
