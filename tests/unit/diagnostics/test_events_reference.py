"""docs/reference/events.md describes the tables and their files as they are."""

from __future__ import annotations

import re
from dataclasses import fields

import pyarrow as pa

from megatrain_diagnostics.columns.schema import SCHEMA_VERSION, TABLE_KEY, VERSION_KEY, stored_schema
from megatrain_diagnostics.events.tables import TABLES, Table
from megatrain_diagnostics.store.segments import AHEAD_KEY
from tests.helpers.source_tree import ROOT

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
