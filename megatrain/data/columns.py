"""Readers of Parquet and Arrow files, which hold the text in a column: generators of records.

Arrow's files (Feather 2) and its streams, which have no index at the end, have the same suffixes; the reader
distinguishes them by their content. A Parquet or Arrow file that is compressed as a whole is first unpacked to a
temporary file, because its index is at its end.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, BinaryIO

from megatrain.compression import COMPRESSIONS, opened
from megatrain.contracts.errors import DataError
from megatrain.data.formats import empty, kind_of, not_utf8
from megatrain.data.input_file import InputFile
from megatrain.formatting import count_text

_ROWS = 256
"""How many texts are Python objects at a time."""
_ARROW_FILE_MAGIC = b"ARROW1"


def read_parquet(path: InputFile, text_key: str) -> Iterator[str]:
    """Yield the column `text_key`, row by row.

    Raises: DataError when pyarrow is absent, the file is unreadable, is not Parquet, has no rows or lacks the column,
    or a row is not text.
    """
    parquet = part_of_pyarrow("parquet", path, "reading Parquet")
    with (
        _seekable(path, ".parquet") as raw,
        _naming_damage(path, "Parquet", raw) as counter,
        parquet.ParquetFile(raw) as file,
    ):
        _check_column(path, file.schema_arrow.names, text_key)
        yield from _texts(file.iter_batches(batch_size=_ROWS, columns=[text_key]), path, text_key, counter)


def read_arrow(path: InputFile, text_key: str) -> Iterator[str]:
    """Yield the column `text_key`, row by row. Raises: DataError as `read_parquet`."""
    ipc = part_of_pyarrow("ipc", path, "reading Arrow")
    with _seekable(path, "") as file, _naming_damage(path, "Arrow", file) as counter:
        is_file = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        file.seek(0)
        reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
        _check_column(path, reader.schema.names, text_key)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        yield from _texts((batch.select([text_key]) for batch in batches), path, text_key, counter)


class _RowCounter:
    """The number of rows that have been read."""

    row = 0


def _texts(batches: Iterator[Any], path: InputFile, text_key: str, counter: _RowCounter) -> Iterator[str]:
    for batch in batches:
        for first in range(0, len(batch), _ROWS):
            for value in _python_values(batch.column(0)[first : first + _ROWS], path, counter.row):
                if not isinstance(value, str):
                    raise DataError(
                        f"{path}: row {counter.row}: column {text_key!r} is {kind_of(value)}, but must be text; name "
                        "the text's column with --text-key"
                    )
                counter.row += 1
                yield value
    if counter.row == 0:
        raise empty(path)


@contextmanager
def _seekable(path: InputFile, own_kind: str) -> Iterator[BinaryIO]:
    """Open a file for random access; a compressed file is unpacked to a temporary file."""
    with opened(path, own_kind) as file:
        if path.suffix not in COMPRESSIONS:
            yield file
            return
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(file, unpacked)
            unpacked.seek(0)
            yield unpacked


@contextmanager
def _naming_damage(path: InputFile, kind: str, file: BinaryIO) -> Iterator[_RowCounter]:
    """Turn pyarrow's errors into a DataError with file, row and byte. Errors of the disk, which have an errno, pass."""
    counter = _RowCounter()
    try:
        yield counter
    except (part_of_pyarrow("lib", path, f"reading {kind}").ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise DataError(
            f"{path}: is not a readable {kind} file: {error} (after {count_text(counter.row, 'row')}, before byte "
            f"{file.tell()}); write or copy it again"
        ) from error


def _check_column(path: InputFile, columns: list[str], text_key: str) -> None:
    if text_key not in columns:
        raise DataError(f"{path}: has no column {text_key!r}; choose one of {', '.join(columns)} with --text-key")


def _python_values(column: Any, path: InputFile, first_row: int) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError as error:
        last_row = first_row + len(column) - 1
        raise not_utf8(f"{path}: rows {first_row} to {last_row}", error) from error


def part_of_pyarrow(name: str, path: object, action: str) -> ModuleType:
    """Return a module of pyarrow. Raises: DataError naming `path` and the action when the package is absent."""
    try:
        importlib.import_module("pyarrow")
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError as error:
        raise DataError(f"{path}: {action} needs pyarrow; pip install 'megatrain[data]'") from error
