"""Files beside token files that belong to them (packed samples, costs of documents): how they are written and checked.

Their headers have the digest of the token files. The last field of a header is the CRC-32 of the fields before it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatrain.contracts.errors import DataError
from megatrain.contracts.files.whole_files import sync_directory, temporary_name
from megatrain.data.dataset import data_digest
from megatrain.data.indexed import IndexedDataset
from megatrain.data.remote_path import DataPath

_SUM_BYTES = 4


@contextmanager
def new_sidecar(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which gets its name at the end. A process that is killed leaves an earlier file as it was.

    Raises: DataError when it cannot be written.
    """
    temporary = path.with_name(temporary_name(path.name))
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror or error}; free space, or change the permissions"
        ) from error
    finally:
        with suppress(OSError):  # on a read-only file system, unlink fails even if there is no file
            temporary.unlink()


def packed_header(header: struct.Struct, *fields: object) -> bytes:
    """Return a header with these fields and their checksum, its last field."""
    return header.pack(*fields, _header_sum(header.pack(*fields, 0)))


def check_header(path: DataPath, header: bytes, digest: bytes, dataset: IndexedDataset, again: str) -> None:
    """Check the digest of the token files in a header, and the checksum at its end. again: how to make the file again.

    Raises: DataError when the file belongs to other token files, or the header is damaged.
    """
    found, wanted = digest.decode("ascii", "replace"), data_digest(dataset)
    if found != wanted:
        raise DataError(f"{path}: was made for data with digest {found}, and {dataset.prefix} has {wanted}; {again}")
    if int.from_bytes(header[-_SUM_BYTES:], "little") != _header_sum(header):
        raise DataError(f"{path}: its header, at byte 0, differs from its checksum; it is damaged, {again}")


def _header_sum(header: bytes) -> int:
    """Return the CRC-32 of a header without its last field."""
    return zlib.crc32(header[:-_SUM_BYTES])
