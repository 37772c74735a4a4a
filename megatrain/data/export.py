"""Write documents of token files as text or as ids, for other programs: JSON lines, Parquet or Arrow.

Megatron-Core and programs built on it read `.bin` and `.idx` directly.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatrain.contracts.errors import DataError
from megatrain.contracts.files.whole_files import temporary_name
from megatrain.data.columns import part_of_pyarrow
from megatrain.data.indexed import IndexedDataset
from megatrain.data.tokenizer import Tokenizer
from megatrain.formatting import count_text

_BATCH_BYTES = 8_000_000
"""How many characters of text, or bytes of ids at 8 bytes each, are in memory at a time."""
_JSON_LINES = frozenset({".jsonl", ".ndjson"})
_COLUMNS = frozenset({".parquet", ".arrow"})
_EXPORTED_KINDS = ".jsonl, .ndjson (also .gz, .zst, .bz2, .xz), .parquet, .arrow"

Record = str | list[int]


def exported(dataset: IndexedDataset, tokenizer: Tokenizer | None, first: int, count: int) -> Iterator[Record]:
    """Yield up to `count` documents from number `first` on: their texts without the end of the document, or, without a
    tokenizer, all their ids. Raises: DataError when there is no document `first`, or tokens cannot be read."""
    if first >= dataset.num_documents:
        raise DataError(
            f"{dataset.prefix}: has {count_text(dataset.num_documents, 'document')}, counted from 0, so none is number "
            f"{first}; give a smaller --first"
        )
    for number in range(first, min(first + count, dataset.num_documents)):
        ids = dataset.document(number).tolist()
        if tokenizer is None:
            yield ids
        else:
            yield tokenizer.decode(ids[:-1] if ids and ids[-1] == tokenizer.eod_id else ids)


def write_records(records: Iterator[Record], key: str, path: Path, *, is_forced: bool = False) -> int:
    """Write records to `path`, in the format of its suffix; return their number.

    If the process is killed, an earlier file stays as it was. key: the key or column of each record.
    Raises: DataError when the kind is unknown, its library is absent, or the file exists (unless `is_forced`) or cannot
    be written.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSED else ""
    kind = suffixes[-1] if suffixes else ""
    if kind not in _JSON_LINES | _COLUMNS or (compression and kind in _COLUMNS):
        raise DataError(f"{path}: unknown kind of file; use {_EXPORTED_KINDS}")
    if path.exists() and not is_forced:
        raise DataError(f"{path}: exists; choose another --output or replace it with --force")
    temporary = path.with_name(temporary_name(path.name))
    try:
        with temporary.open("wb") as raw:
            if kind in _COLUMNS:
                num_records = _write_columns(records, key, raw, kind, path)
            else:
                num_records = _write_lines(records, key, raw, compression, path)
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}; choose another --output") from error
    finally:
        with suppress(OSError):  # on a read-only file system, unlink fails even if there is no file
            temporary.unlink()
    return num_records


def _write_lines(records: Iterator[Record], key: str, raw: BinaryIO, compression: str, path: Path) -> int:
    num_records = 0
    with ExitStack() as stack:
        file = stack.enter_context(_COMPRESSED[compression](raw, path)) if compression else raw
        for record in records:
            file.write(json.dumps({key: record}, ensure_ascii=False).encode() + b"\n")
            num_records += 1
    return num_records


def _write_columns(records: Iterator[Record], key: str, raw: BinaryIO, kind: str, path: Path) -> int:
    pyarrow = part_of_pyarrow("lib", path, "writing it")
    num_records = 0
    with ExitStack() as stack:
        writer: Any = None
        for batch in _batches(records):
            type_ = pyarrow.large_string() if isinstance(batch[0], str) else pyarrow.large_list(pyarrow.int64())
            table = pyarrow.Table.from_arrays([pyarrow.array(batch, type_)], [key])
            if writer is None and kind == ".parquet":
                parquet = part_of_pyarrow("parquet", path, "writing it")
                writer = stack.enter_context(parquet.ParquetWriter(raw, table.schema, compression="zstd"))
            elif writer is None:
                writer = stack.enter_context(part_of_pyarrow("ipc", path, "writing it").new_file(raw, table.schema))
            writer.write_table(table)
            num_records += len(batch)
    return num_records


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    num_bytes = 0
    for record in records:
        batch.append(record)
        num_bytes += len(record) if isinstance(record, str) else 8 * len(record)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _zstd(raw: BinaryIO, path: Path) -> BinaryIO:
    pyarrow = part_of_pyarrow("lib", path, "writing it")
    return cast("BinaryIO", pyarrow.CompressedOutputStream(pyarrow.PythonFile(raw, mode="w"), "zstd"))


def _xz(raw: BinaryIO, path: Path) -> BinaryIO:
    return cast("BinaryIO", lzma.LZMAFile(raw, "wb"))


_COMPRESSED: Mapping[str, Callable[[BinaryIO, Path], Any]] = {
    ".gz": lambda raw, path: gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0),
    ".zst": _zstd,
    ".bz2": lambda raw, path: bz2.BZ2File(raw, "wb"),
    ".xz": _xz,
}
