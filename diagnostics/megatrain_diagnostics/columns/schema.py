"""The Arrow schema of each table of events, and the conversion from numpy to Arrow and back.

There are two forms. On the wire, operations and kinds of values are numbers, so that up to a million rows a second need
no look-up. In files they are names, as text with a dictionary, so that other Parquet readers need no list of the
numbers. The metadata of both forms contains the table's name and the version of its schema.

In this module, `kind` is the class of a table, except in the column `kind` of step values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from megatrain.contracts.black_box.operations import StepValue, operation_name
from megatrain.contracts.errors import DataError
from megatrain.formatting import count_text
from megatrain_diagnostics.events.tables import (
    TABLES,
    Int8,
    Table,
    TableType,
    columns_of,
    from_columns,
)

SCHEMA_VERSION = 3
TABLE_KEY = b"megatrain_table"
VERSION_KEY = b"megatrain_schema_version"
NOT_KNOWN = 0
"""Number for an operation or a kind of value with an unknown name. No operation or kind has this number."""

_ARROW_TYPES = {
    "u1": pa.uint8(),
    "i2": pa.int16(),
    "i4": pa.int32(),
    "i8": pa.int64(),
    "f8": pa.float64(),
    "text": pa.string(),
}
_NAME_TYPE = pa.dictionary(pa.uint8(), pa.string())
_NUM_NUMBERS = 256  # number of values of a byte
_KINDS: dict[str, type[Table]] = {kind.NAME: kind for kind in TABLES}
_VALUE_NAMES = {value.value: value.text for value in StepValue}
_NAMES = {
    "operation": tuple(operation_name(number) for number in range(_NUM_NUMBERS)),
    "kind": tuple(_VALUE_NAMES.get(number, f"value-{number}") for number in range(_NUM_NUMBERS)),
}
_NUMBERS = {column: {name: number for number, name in enumerate(names)} for column, names in _NAMES.items()}


def table_named(name: str) -> type[Table] | None:
    """Return the table of this name; None if there is no such table."""
    return _KINDS.get(name)


def names_of(column: str) -> tuple[str, ...] | None:
    """Return the names of a column's numbers, 0 to 255, as in files; None if the column has no names."""
    return _NAMES.get(column)


def time_column(kind: type[Table]) -> str | None:
    """Return the name of the column with the time of a row; None if the table has no times."""
    return next((name for name in ("start_ns", "at_ns") if name in columns_of(kind)), None)


def arrow_schema(kind: type[Table]) -> pa.Schema:
    """Return the schema of a table on the wire."""
    fields = [pa.field(name, _ARROW_TYPES[dtype], nullable=False) for name, dtype in columns_of(kind).items()]
    return pa.schema(fields, metadata=_metadata(kind))


def stored_schema(kind: type[Table]) -> pa.Schema:
    """Return the schema of a table in files."""
    fields = [
        pa.field(name, _NAME_TYPE if name in _NAMES else _ARROW_TYPES[dtype], nullable=False)
        for name, dtype in columns_of(kind).items()
    ]
    return pa.schema(fields, metadata=_metadata(kind))


def kind_of(schema: pa.Schema) -> type[Table]:
    """Return the table named in a schema. Raises: DataError for no table, an unknown table or another version."""
    metadata = schema.metadata or {}
    if TABLE_KEY not in metadata:
        raise DataError("its schema does not name a table of events; it was not written by megatrain")
    name = metadata[TABLE_KEY].decode(errors="replace")
    kind = table_named(name)
    if kind is None:
        raise DataError(f"unknown table {name!r}; the known tables are {', '.join(_KINDS)}")
    version = metadata.get(VERSION_KEY, b"").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        raise DataError(f"table {name} of version {version!r}; this program reads {SCHEMA_VERSION}")
    return kind


def to_arrow(table: Table) -> pa.RecordBatch:
    """Return a table in wire form. Columns of numbers are not copied; invalid Unicode in texts is replaced."""
    kind = type(table)
    arrays = [
        _text_array(getattr(table, name)) if dtype == "text" else pa.array(getattr(table, name), _ARROW_TYPES[dtype])
        for name, dtype in columns_of(kind).items()
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(kind))


def from_arrow(kind: type[TableType], data: pa.RecordBatch | pa.Table) -> TableType:
    """Convert rows in either form to a numpy table. Numbers in one chunk are not copied; their arrays are read-only.

    Raises: DataError, with the names, if the columns are not those of the table, or one has another type or nulls.
    """
    check_columns(kind, data.schema)
    columns: dict[str, Any] = {}
    for index, (name, dtype) in enumerate(columns_of(kind).items()):
        array = _one_chunk(data.column(index))
        if array.null_count:
            raise DataError(f"{kind.NAME}.{name}: {count_text(array.null_count, 'row')} without a value")
        if name in _NAMES and array.type != pa.uint8():
            columns[name] = _numbers(name, array)
        else:
            columns[name] = array.to_numpy(zero_copy_only=dtype != "text")
    return from_columns(kind, columns)


def check_columns(kind: type[Table], schema: pa.Schema) -> None:
    """Raise DataError unless a schema has the table's columns, in order and with the types of either form."""
    wanted = columns_of(kind)
    if schema.names != list(wanted):
        raise DataError(f"{kind.NAME}: columns {schema.names}; expected {list(wanted)}")
    for index, (name, dtype) in enumerate(wanted.items()):
        found = schema.field(index).type
        is_name = name in _NAMES and (
            pa.types.is_string(found) or (pa.types.is_dictionary(found) and pa.types.is_string(found.value_type))
        )
        if found != _ARROW_TYPES[dtype] and not is_name:
            raise DataError(f"{kind.NAME}.{name}: type {found}; expected {_ARROW_TYPES[dtype]}")


def to_stored(kind: type[Table], data: pa.RecordBatch | pa.Table) -> pa.Table:
    """Convert rows from wire form to file form."""
    table = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data
    arrays = [
        _named(name, table.column(name)) if name in _NAMES else table.column(name) for name in stored_schema(kind).names
    ]
    return pa.Table.from_arrays(arrays, schema=stored_schema(kind))


def _metadata(kind: type[Table]) -> dict[bytes, bytes]:
    return {TABLE_KEY: kind.NAME.encode(), VERSION_KEY: str(SCHEMA_VERSION).encode()}


def _text_array(texts: Any) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # a text has lone surrogates, which represent bytes of a log that are not UTF-8
        return pa.array([str(text).encode(errors="replace").decode() for text in texts], pa.string())


def _one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return column.combine_chunks()


def _numbers(column: str, names: pa.Array) -> Int8:
    """Return the number of each name; NOT_KNOWN for unknown names."""
    encoded = names if pa.types.is_dictionary(names.type) else names.dictionary_encode()
    numbers = _NUMBERS[column]
    by_index = [numbers.get(name, NOT_KNOWN) for name in encoded.dictionary.to_pylist()]
    indices = encoded.indices.to_numpy(zero_copy_only=True)
    found: Int8 = np.array(by_index or [NOT_KNOWN], dtype=np.uint8)[indices]
    return found


def _named(column: str, numbers: pa.ChunkedArray) -> pa.Array:
    """Return the name of each number. The dictionary has only names that occur, so that statistics are exact."""
    values = _one_chunk(numbers).to_numpy(zero_copy_only=True)
    used = np.flatnonzero(np.bincount(values, minlength=_NUM_NUMBERS))
    index_of = np.zeros(_NUM_NUMBERS, dtype=np.uint8)
    index_of[used] = np.arange(len(used), dtype=np.uint8)
    names = pa.array([_NAMES[column][number] for number in used], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(index_of[values]), names)
