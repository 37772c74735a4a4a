"""The two Arrow forms of the tables: conversion in both directions, what is refused, and their documented columns."""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pytest

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain.contracts.errors import DataError
from megatrain_diagnostics.columns.schema import (
    NOT_KNOWN,
    SCHEMA_VERSION,
    TABLE_KEY,
    VERSION_KEY,
    arrow_schema,
    from_arrow,
    kind_of,
    names_of,
    stored_schema,
    to_arrow,
    to_stored,
)
from megatrain_diagnostics.events.tables import TABLES, Clocks, LogLines, Spans, Table, Values, columns_of, from_columns
from megatrain_diagnostics.store.segments import AHEAD_KEY
from tests.helpers.source_tree import ROOT
from tests.helpers.table_rows import table_rows


def some_rows(kind: type[Table], count: int = 300) -> Table:
    """Return rows with all values of a byte column, and the extreme values of the others."""
    columns: dict[str, object] = {}
    for name, dtype in columns_of(kind).items():
        if dtype == "text":
            columns[name] = [f"{name} {row} \u00e9\u4e16\n" for row in range(count)]
        elif dtype == "f8":
            columns[name] = np.resize([0.5, np.inf, -np.inf, np.nan], count)
        else:
            ends = np.iinfo(np.dtype(dtype))
            columns[name] = np.resize(np.array([*range(256)] if dtype == "u1" else [ends.min, -1, 7, ends.max]), count)
    return from_columns(kind, columns)


def assert_same(left: Table, right: Table) -> None:
    for name in columns_of(type(left)):
        expected, found = getattr(left, name), getattr(right, name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.NAME)
def test_tables_are_read_back_from_both_forms(kind: type[Table]) -> None:
    for table in (some_rows(kind), some_rows(kind, 0)):
        batch = to_arrow(table)
        stored = to_stored(kind, batch)

        assert batch.schema.equals(arrow_schema(kind), check_metadata=True)
        assert stored.schema.equals(stored_schema(kind), check_metadata=True)
        assert kind_of(batch.schema) is kind
        assert kind_of(stored.schema) is kind
        assert_same(table, from_arrow(kind, batch))
        assert_same(table, from_arrow(kind, stored))


def test_parts_with_dictionaries_of_their_own_become_one_table() -> None:
    first, second = (some_rows(Values, count) for count in (3, 40))

    table = pa.concat_tables([to_stored(Values, to_arrow(first)), to_stored(Values, to_arrow(second))])

    found = from_arrow(Values, table)
    np.testing.assert_array_equal(found.kind, [0, 1, 2, *range(40)])


def test_numbers_are_not_copied() -> None:
    batch = to_arrow(some_rows(Spans))

    address = batch.column("start_ns").buffers()[1].address

    assert from_arrow(Spans, batch).start_ns.ctypes.data == address


def test_files_name_operations_and_values() -> None:
    spans = to_stored(Spans, to_arrow(some_rows(Spans))).column("operation").to_pylist()
    values = to_stored(Values, to_arrow(some_rows(Values))).column("kind").to_pylist()

    assert [spans[one.number] for one in Operation] == [one.value for one in Operation]
    assert [values[one] for one in StepValue] == [one.text for one in StepValue]
    assert spans[200] == "operation-200"
    stored = to_stored(Spans, to_arrow(some_rows(Spans, 3)))
    assert stored.column("operation").chunk(0).dictionary.to_pylist() == ["operation-0", "step", "data-wait"]


def test_no_known_number_marks_an_unknown_name() -> None:
    assert NOT_KNOWN not in [one.number for one in Operation]
    assert NOT_KNOWN not in list(StepValue)
    for column in ("operation", "kind"):
        assert len(set(names_of(column) or ())) == 256


def test_name_of_a_newer_program_is_distinguished() -> None:
    stored = to_stored(Values, to_arrow(some_rows(Values, 2)))
    newer = stored.set_column(4, "kind", pa.array(["loss", "perplexity"]))

    assert from_arrow(Values, newer).kind.tolist() == [StepValue.LOSS, NOT_KNOWN]


def test_text_that_is_not_unicode_is_repaired() -> None:
    table = table_rows(LogLines, {"line": "bad \udcff byte"})

    assert from_arrow(LogLines, to_arrow(table)).line.tolist() == ["bad ? byte"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch.select(["at_ns", "host"]), r"clocks: columns \['at_ns', 'host'\]; expected"),
        (lambda batch: batch.rename_columns(["at_ns", "offset_ns", "error_ns", "node"]), "'node'"),
        (lambda batch: batch.set_column(1, "offset_ns", pa.array([1, 2], pa.int32())), "clocks.offset_ns: type int32"),
        (lambda batch: batch.set_column(1, "offset_ns", pa.array([1, None], pa.int64())), "1 row without a value"),
    ],
)
def test_other_columns_are_refused(change, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrow(Clocks, change(to_arrow(some_rows(Clocks, 2))))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "does not name a table"),
        ({"megatrain_table": "spans"}, "spans of version ''"),
        ({"megatrain_table": "spans", "megatrain_schema_version": "4"}, "version '4'; this program reads 3"),
        ({"megatrain_table": "pancakes", "megatrain_schema_version": "1"}, "unknown table 'pancakes'"),
    ],
)
def test_schema_without_a_known_table_is_refused(metadata: dict[str, str] | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        kind_of(arrow_schema(Spans).with_metadata(metadata))


PAGE = (ROOT / "docs" / "reference" / "events.md").read_text()


def type_text(kind: type[Table], column: str) -> str:
    dtype = stored_schema(kind).field(column).type
    return "name" if pa.types.is_dictionary(dtype) else str(dtype)


def test_tables_and_columns_are_documented() -> None:
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == ["Files", *(kind.NAME for kind in TABLES)]
    for kind in TABLES:
        section = re.search(rf"^## {kind.NAME}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
        assert section is not None
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in section[1].splitlines() if line[:1] == "|"
        ]
        expected = [[field.name, type_text(kind, field.name), field.metadata["doc"]] for field in fields(kind)]
        assert rows[2:] == expected, kind.NAME


def test_metadata_is_named() -> None:
    for key in (TABLE_KEY, VERSION_KEY, AHEAD_KEY):
        assert f"`{key.decode()}`" in PAGE
    assert f"`{VERSION_KEY.decode()}` ({SCHEMA_VERSION})" in PAGE
