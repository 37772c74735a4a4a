"""Reads and writes a public format of traces: a Parquet file of operations, and a small YAML file about the job.

The format is that of ByteDance-Seed/StragglerAnalysis (OSDI'25): one row per operation, reduced over tensor
parallelism, with times in seconds from the start of the step. Other columns are ignored.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatrain.contracts.errors import DataError
from megatrain.formatting import count_text
from megatrain_diagnostics.analysis.whatif.operations import PUBLIC_NAMES, JobShape, OperationTable
from megatrain_diagnostics.events.tables import Float64, Int64
from megatrain_diagnostics.store.parquet_limits import check_pages, opened_parquet

_INTEGERS = {
    "dp_rank": "dp_rank", "stage": "stage", "rank": "rank", "step": "step", "seq_id": "sequence", "mc": "chunk",
    "gmc": "model_chunk", "mb_id": "microbatch",
}  # fmt: skip
"""Column of the file -> field of OperationTable."""
_TIMES = {"start_ts": "start_s", "duration": "duration_s"}
_MAY_BE_NULL = {"mc", "gmc", "mb_id"}
_LARGEST = 2**53
"""Larger integers are not exact as floats."""
_MAX_META_BYTES = 1 << 16


def read_trace(path: Path) -> OperationTable:
    """Return the operations of a trace file. Raises: DataError naming the file and the problem."""
    wanted = ["optype", *_INTEGERS, *_TIMES]
    try:
        check_pages(path, ())
        with opened_parquet(path, ("optype",)) as file:
            missing = [name for name in wanted if name not in file.schema_arrow.names]
            if missing:
                raise DataError(f"{path}: no column {', '.join(missing)}; a trace has {', '.join(wanted)}")
            table = file.read(columns=wanted)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a Parquet file ({_first_line(error)})") from error
    names, kind = _kinds(path, table)
    columns: dict[str, Any] = {ours: _integers(path, table, name) for name, ours in _INTEGERS.items()}
    columns |= {ours: _floats(path, table, name) for name, ours in _TIMES.items()}
    return OperationTable(kinds=names, kind=kind, **columns)


def write_trace(path: Path, table: OperationTable) -> None:
    """Write operations in the public format. Raises: DataError when the file cannot be written."""
    columns: dict[str, pa.Array] = {
        "optype": pa.DictionaryArray.from_arrays(pa.array(table.kind.astype(np.int8)), pa.array(table.kinds))
    }
    for name, ours in _INTEGERS.items():
        columns[name] = pa.array(getattr(table, ours), pa.int64() if name == "step" else pa.int32())
    columns |= {name: pa.array(getattr(table, ours), pa.float64()) for name, ours in _TIMES.items()}
    order = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc")
    try:
        pq.write_table(pa.table({name: columns[name] for name in order}), path, compression="zstd")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({_first_line(error)})") from error


def read_meta(path: Path) -> JobShape:
    """Return the shape of a job from a metadata file. Raises: DataError with the invalid line."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_META_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({_first_line(error)})") from error
    own_names = {PUBLIC_NAMES.get(field.name, field.name): field.name for field in fields(JobShape)}
    known = set(own_names)
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split(" #")[0].strip()
        if not content or content.startswith("#") or content == "---":
            continue
        name, colon, value = content.partition(":")
        if not colon or line[0].isspace():
            raise DataError(f"{path}:{number}: {content[:60]!r} is not a line `name: value`")
        if name.strip() in known:
            found[name.strip()] = value.strip().strip("'\"")
    if not found.get("trial_name"):
        others = ", ".join(sorted(known - {"trial_name"}))
        raise DataError(f"{path}: no trial_name; a metadata file must contain it, and may contain {others}")
    numbers: dict[str, int] = {}
    for name in known & set(found) - {"trial_name"}:
        if not found[name].isascii() or not found[name].isdigit() or len(found[name]) > 9:
            raise DataError(f"{path}: {name}: {found[name][:40]!r} is not a whole number")
        numbers[name] = int(found[name])
    if "world_size" not in numbers:
        sizes = [numbers.get(name, 1) for name in ("dp_size", "pp_size", "tp_size", "dsp_size")]
        numbers["world_size"] = int(np.prod(sizes))
    try:
        return JobShape(trial_name=found["trial_name"], **{own_names[name]: numbers[name] for name in numbers})
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def write_meta(path: Path, shape: JobShape) -> None:
    """Write the metadata file of a trace. Raises: DataError when the file cannot be written."""
    try:
        path.write_text("".join(f"{name}: {value}\n" for name, value in shape.public().items()), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({_first_line(error)})") from error


def _kinds(path: Path, table: pa.Table) -> tuple[tuple[str, ...], Int64]:
    column = table.column("optype").combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.string())
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    if pa.types.is_large_string(column.type.value_type) or pa.types.is_string_view(column.type.value_type):
        column = column.cast(pa.dictionary(pa.int32(), pa.string()))
    if column.null_count or not pa.types.is_string(column.type.value_type):
        raise DataError(f"{path}: optype must be text in every row; it is {column.type} with {column.null_count} nulls")
    return tuple(column.dictionary.to_pylist()), column.indices.to_numpy().astype(np.int64)


def _integers(path: Path, table: pa.Table, name: str) -> Int64:
    column = table.column(name)
    if pa.types.is_floating(column.type):
        column = _whole(path, column, name)
    if not pa.types.is_integer(column.type):
        raise DataError(f"{path}: {name} must be whole numbers, found {column.type}")
    if column.null_count:
        if name not in _MAY_BE_NULL:
            raise DataError(f"{path}: {name} is missing in {count_text(column.null_count, 'row')}")
        column = column.fill_null(-1)
    numbers: Int64 = column.to_numpy().astype(np.int64)
    return numbers


def _whole(path: Path, column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Convert floats to integers: pandas writes an integer column with missing values as floats."""
    values = column.to_numpy().astype(np.float64)
    is_missing = np.isnan(values)
    if not (np.floor(values) == values)[~is_missing].all() or (np.abs(values[~is_missing]) > _LARGEST).any():
        raise DataError(f"{path}: {name} must be whole numbers, found {column.type} with other values")
    return pa.chunked_array([pa.array(np.where(is_missing, 0.0, values).astype(np.int64), mask=is_missing)])


def _floats(path: Path, table: pa.Table, name: str) -> Float64:
    """Return times in seconds; NaN for a row without a time, whose step is left out later."""
    column = table.column(name)
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise DataError(f"{path}: {name} must be seconds, found {column.type}")
    seconds: Float64 = column.to_numpy().astype(np.float64)
    return seconds


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
