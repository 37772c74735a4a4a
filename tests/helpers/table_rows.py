"""Rows of a table of events of which a test names only some columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatrain_diagnostics.events.tables import TableType, columns_of, from_columns


def table_rows(kind: type[TableType], columns: Mapping[str, Any]) -> TableType:
    """Return rows with these columns. A number or text is that of every row; a missing column is 0, or "" for text."""
    dtypes = columns_of(kind)
    assert columns.keys() <= dtypes.keys(), columns.keys() - dtypes.keys()
    count = max((len(value) for value in columns.values() if np.ndim(value)), default=1)
    found = {name: columns.get(name, "" if dtype == "text" else 0) for name, dtype in dtypes.items()}
    return from_columns(kind, {name: np.array(np.broadcast_to(value, count)) for name, value in found.items()})
