"""Stored events as Arrow tables, in the form of the files: `megatrain.read_run(...).events(...)` calls this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from megatrain.contracts.errors import NotFoundError
from megatrain_diagnostics.columns.schema import table_named, to_arrow, to_stored
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import TABLES, joined
from megatrain_diagnostics.store.reader import StoredEvents


def read_arrow_table(
    directory: Path,
    table: str,
    *,
    rounds: tuple[int, ...] | None = None,
    ranks: tuple[int, ...] | None = None,
    first_step: int | None = None,
    last_step: int | None = None,
) -> tuple[pa.Table, tuple[str, ...]]:
    """Return the rows of a table of events below `directory`, and a sentence for each part that cannot be read.

    None: no limit. A limit on a column that the table lacks has no effect. Operations and kinds are names. Without the
    directory there are no rows.
    Raises: NotFoundError for an unknown table; DataError when nothing can be read, or the answer is too large.
    """
    kind: Any = table_named(table)  # one of a union of classes, which no type variable takes
    if kind is None:
        raise NotFoundError(f"table {table!r} of events; the tables are {', '.join(one.NAME for one in TABLES)}")
    if not directory.exists():
        return to_stored(kind, to_arrow(joined(kind, []))), ()
    events = StoredEvents(directory)
    rows = events.read(kind, Where(rounds=rounds, ranks=ranks, first_step=first_step, last_step=last_step))
    return to_stored(kind, to_arrow(rows)), events.problems()
