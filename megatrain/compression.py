"""Open files of text that may be compressed (gzip, bzip2, xz, Zstandard), by their names or by their content.

Documents are opened by the last suffix of their names: .gz, .bz2, .xz and .zst. A file that is compressed although its
name does not say so is refused, because its bytes are no text. Logs are opened by their content, because rotation
renames them.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from megatrain.contracts.errors import DataError

_MAGIC: Mapping[bytes, str] = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\x00": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".zip",
    b"PAR1": ".parquet",
}
"""How files of these kinds begin."""
_LONGEST_MAGIC = max(map(len, _MAGIC))


def _open_zstd(path: Path) -> BinaryIO:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path}: reading .zst needs pyarrow; pip install 'megatrain[data]'") from error
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


_OPENERS: Mapping[str, Callable[[Path], BinaryIO]] = {
    ".gz": cast("Callable[[Path], BinaryIO]", gzip.open),
    ".bz2": cast("Callable[[Path], BinaryIO]", bz2.open),
    ".xz": cast("Callable[[Path], BinaryIO]", lzma.open),
    ".zst": _open_zstd,
}
COMPRESSIONS = tuple(_OPENERS)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; the block receives the bytes of its text, uncompressed.

    Raises: DataError when the file cannot be read, is damaged, or is of another kind than its name says.
    """
    suffix = path.suffix.lower()
    with _naming(path, suffix):
        _check_kind(path, suffix)
        with _OPENERS.get(suffix, _open_plain)(path) as file:
            yield file


@contextmanager
def opened_by_content(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; the block receives its bytes, uncompressed if its content is that of a compression.

    Raises: DataError when the file cannot be read or is damaged.
    """
    with _naming(path, "compressed"):
        with path.open("rb") as file:
            kind = kind_of_content(file.read(_LONGEST_MAGIC))
        with _OPENERS.get(kind, _open_plain)(path) as file:
            yield file


def kind_of_content(start: bytes) -> str:
    """Return the suffix of the kind of file that begins like this: a compression, ".zip" or ".parquet"; else ""."""
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "")


@contextmanager
def _naming(path: Path, suffix: str) -> Iterator[None]:
    """Turn errors of reading into errors that name the file. Raises: DataError."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, suffix, error) from error
    except OSError as error:
        # gzip, bz2 and zstd report damaged bytes as OSError without an error number
        raise (unreadable(path, error) if error.errno else _damaged(path, suffix, error)) from error


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a file that the operating system cannot read."""
    return DataError(f"{path}: cannot be read: {error.strerror or error}; check the path and its permissions")


def _open_plain(path: Path) -> BinaryIO:
    return path.open("rb")


def _check_kind(path: Path, suffix: str) -> None:
    with path.open("rb") as file:
        start = file.read(_LONGEST_MAGIC)
    found = kind_of_content(start)
    if found and found != suffix:
        hint = f"rename it to {path.name}{found}" if found in _OPENERS else f"give it as what it is, a {found} file"
        raise DataError(f"{path}: its content is that of a {found} file, not of text; {hint}")
    if start and suffix in _OPENERS and not found:
        raise DataError(f"{path}: is not a {suffix} file: it starts with {start!r}; rename it as what it is")


def _damaged(path: Path, suffix: str, error: Exception) -> DataError:
    return DataError(f"{path}: the {suffix} file is damaged or cut short: {error}; compress or copy it again")
