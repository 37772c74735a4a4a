"""Open text files that may be compressed (gzip, bzip2, xz, Zstandard), by their names or by their content.

For documents the last suffix of the name decides: .gz, .bz2, .xz or .zst. A compressed file without such a suffix is an
error, because its bytes are not text. For logs the content decides, because log rotation renames them.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol, cast

from megatrain.contracts.errors import DataError

_MAGIC: Mapping[bytes, str] = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\x00": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".zip",
    b"PAR1": ".parquet",
}
"""The first bytes of a file, and the suffix of the kind of file that they identify."""
_LONGEST_MAGIC = max(map(len, _MAGIC))


class Readable(Protocol):
    """A path, or an object for a file at a URL. `str` of it names the file in errors."""

    @property
    def name(self) -> str: ...

    @property
    def suffix(self) -> str: ...

    def open(self, mode: Any, /) -> Any:
        """Open the file's own bytes. Raises: OSError."""


def _open_zstd(file: BinaryIO) -> BinaryIO:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd"))


_DECOMPRESSORS: Mapping[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": cast("Callable[[BinaryIO], BinaryIO]", gzip.open),
    ".bz2": cast("Callable[[BinaryIO], BinaryIO]", bz2.open),
    ".xz": cast("Callable[[BinaryIO], BinaryIO]", lzma.open),
    ".zst": _open_zstd,
}
COMPRESSIONS = tuple(_DECOMPRESSORS)


@contextmanager
def opened(path: Readable, own_kind: str = "") -> Iterator[BinaryIO]:
    """Open a file for reading; the block receives its bytes, decompressed.

    own_kind: the result of `kind_of_content` for the file when it is not compressed; "" for text.
    Raises: DataError when the file cannot be read, is damaged, its content does not match its suffix, or pyarrow, which
    reads .zst, is absent.
    """
    suffix = path.suffix.lower()
    compression = suffix if suffix in _DECOMPRESSORS else ""
    with path_opened(path, suffix) as raw:
        _check_kind(path, raw, compression, own_kind)
        yield _decompressed(path, raw, compression)


@contextmanager
def opened_by_content(path: Readable) -> Iterator[BinaryIO]:
    """Open a file for reading; the block receives its bytes, decompressed if the content is compressed.

    Raises: DataError when the file cannot be read or is damaged, or pyarrow, which reads Zstandard, is absent.
    """
    with path_opened(path, "compressed") as raw:
        kind = kind_of_content(raw.read(_LONGEST_MAGIC))
        raw.seek(0)
        yield _decompressed(path, raw, kind)


def kind_of_content(start: bytes) -> str:
    """Return the suffix for a file that begins with these bytes: of a compression, ".zip" or ".parquet"; else ""."""
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "")


@contextmanager
def path_opened(path: Readable, kind: str) -> Iterator[BinaryIO]:
    """Open a file without decompression. Read errors in the block become DataErrors that name the file, and the byte if
    the content is damaged.

    kind: the kind of file, for the error message. Raises: DataError.
    """
    position = 0
    try:
        with path.open("rb") as raw:
            try:
                yield raw
            finally:
                position = 0 if raw.closed else raw.tell()
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, kind, position, error) from error
    except OSError as error:
        # gzip, bz2 and zstd report damaged bytes as OSError without an error number
        raise (unreadable(path, error) if error.errno else _damaged(path, kind, position, error)) from error


def _decompressed(path: Readable, raw: BinaryIO, kind: str) -> BinaryIO:
    """Return a reader of the decompressed bytes of an open file, which must stay open."""
    decompress = _DECOMPRESSORS.get(kind)
    try:
        return raw if decompress is None else decompress(raw)
    except ImportError as error:
        raise DataError(f"{path}: reading {kind} needs pyarrow; pip install 'megatrain[data]'") from error


def unreadable(path: object, error: OSError) -> DataError:
    """Return the error for a file that the operating system cannot read."""
    return DataError(f"{path}: cannot be read: {error.strerror or error}; check the path and its permissions")


def _check_kind(path: Readable, raw: BinaryIO, compression: str, own_kind: str) -> None:
    start = raw.read(_LONGEST_MAGIC)
    raw.seek(0)
    found = kind_of_content(start)
    if found and found != (compression or own_kind):
        hint = f"rename it to {path.name}{found}" if found in COMPRESSIONS else f"rename it to end with {found}"
        raise DataError(f"{path}: its content is that of a {found} file, not of text; {hint}")
    if start and compression and not found:
        raise DataError(
            f"{path}: is not a {compression} file: it starts with {start!r}; rename it to match its content"
        )


def _damaged(path: Readable, kind: str, position: int, error: Exception) -> DataError:
    return DataError(
        f"{path}: the {kind} file is damaged or cut short before byte {position}: {error}; compress or copy it again"
    )
