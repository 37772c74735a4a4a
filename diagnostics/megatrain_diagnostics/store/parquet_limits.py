"""Limits the unpacked size of a Parquet file, by checks of its footer, pages and texts before it is read.

A run directory may contain files that other users or programs wrote. A column with the same value in every row takes
almost no space, so a file of a megabyte can become gigabytes in memory. The footer has the number of rows and their
types. Texts are read in dictionary form, which has each text once, to find the length of texts that many rows share.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.store.parquet_pages import unpacked_bytes

MAX_FOOTER_BYTES = 16 << 20
"""Limit of the footer in the file. A parsed footer takes ten times as much memory."""
MAX_PLAIN_BYTES = 512 << 20
"""Limit for all rows of a file. Files of the daemon have at most about 1.5 million rows: 130 MB of spans."""
_TEXT_BYTES = 64
"""Size of a Python string, without its characters."""
_BATCH_ROWS = 65_536
_TAIL_BYTES = 8  # length of the footer, then the magic
_MAGIC = b"PAR1"


def opened_parquet(path: Path, texts: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a file after checking its footer; the columns `texts` are read in dictionary form.

    Raises: DataError naming the exceeded limit; FileNotFoundError; pa.ArrowException, OSError and ValueError for a file
    that is not a Parquet file.
    """
    with path.open("rb") as file:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, num_bytes - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
    footer_bytes = int.from_bytes(tail[:4], "little") if tail[4:] == _MAGIC else 0
    if num_bytes >= footer_bytes > MAX_FOOTER_BYTES:
        raise DataError(f"{path}: a footer of {footer_bytes} bytes; at most {MAX_FOOTER_BYTES} are read")
    opened = pq.ParquetFile(path, read_dictionary=list(texts), page_checksum_verification=True)
    try:
        _check_footer(path, opened)
    except BaseException:
        opened.close()
        raise
    return opened


def check_pages(path: Path, texts: Sequence[str]) -> None:
    """Check that the pages of a file, and its rows with their shared texts, stay within the limits.

    Raises: DataError if they do not; the other errors of `opened_parquet`.
    """
    with opened_parquet(path, texts) as file:
        with path.open("rb") as raw:
            num_bytes = 0
            for page_bytes in unpacked_bytes(raw, file.metadata):
                num_bytes += page_bytes
                _check_plain(path, num_bytes)
        if not texts:
            return
        num_bytes = plain_bytes(file.schema_arrow, file.metadata.num_rows)
        for batch in file.iter_batches(_BATCH_ROWS, columns=list(texts)):
            num_bytes += sum(map(_text_bytes, batch.columns))
            _check_plain(path, num_bytes)


def plain_bytes(schema: pa.Schema, num_rows: int) -> int:
    """Return the unpacked size of rows, without the characters of texts."""
    return num_rows * sum(_width(field.type) for field in schema)


def _check_footer(path: Path, file: pq.ParquetFile) -> None:
    metadata = file.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    num_rows = sum(group.num_rows for group in groups)
    if num_rows != metadata.num_rows:
        raise DataError(f"{path}: {metadata.num_rows} rows, but {num_rows} in its row groups")
    for group in groups:
        lengths = {group.column(number).num_values for number in range(group.num_columns)}
        if lengths - {group.num_rows}:
            raise DataError(
                f"{path}: a row group of {group.num_rows} rows with columns of {sorted(lengths)[:4]} values"
            )
    _check_plain(path, max(plain_bytes(file.schema_arrow, num_rows), sum(group.total_byte_size for group in groups)))


def _check_plain(path: Path, num_bytes: int) -> None:
    if num_bytes > MAX_PLAIN_BYTES:
        most = MAX_PLAIN_BYTES >> 20
        raise DataError(f"{path}: its rows unpack to {num_bytes >> 20} MiB or more; at most {most} MiB are read")


def _width(kind: pa.DataType) -> int:
    """Return the bytes of a value; a type without a fixed width counts as a text. Nested types are refused later."""
    try:
        return 1 if pa.types.is_dictionary(kind) else max(1, kind.bit_width // 8)
    except ValueError:
        return _TEXT_BYTES


def _text_bytes(column: pa.Array) -> int:
    """Return the total length in bytes of the texts in all rows of a column in dictionary form."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pc.binary_length(column.dictionary).fill_null(0).to_numpy(zero_copy_only=False)
    places = column.indices.drop_null().to_numpy(zero_copy_only=False)
    return int(np.asarray(lengths, dtype=np.int64)[places].sum()) if len(lengths) else 0
