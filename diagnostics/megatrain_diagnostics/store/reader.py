"""Reads events from a directory of segments with DuckDB: the EventSource of all analyses by `megatrain diag`.

DuckDB stores nothing: its database is in memory and empty, and each query names its files. So any number of processes
can read while the daemon writes, and readers work without the daemon. A file that vanishes during a query was merged or
has expired; the query is then repeated on the files that exist now.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from megatrain.contracts.errors import DataError, NotFoundError
from megatrain_diagnostics.columns.schema import (
    NOT_KNOWN,
    from_arrow,
    names_of,
    table_named,
    time_column,
    to_arrow,
    to_stored,
)
from megatrain_diagnostics.events.source import Where, in_order
from megatrain_diagnostics.events.tables import TABLES, Table, TableType, columns_of, joined
from megatrain_diagnostics.store.catalog import Catalog
from megatrain_diagnostics.store.segments import Segment, damage_of_rows

MEMORY_LIMIT_BYTES = 2 * 10**9
ALL = Where()
_ANSWER_ROWS = 65_536
"""Size of one part of an answer."""
_INTERRUPT_AGAIN_S = 0.05
_NUM_TRIES = 8
"""Limit of tries while segments vanish or are found damaged: more than compaction can cause."""

_GLOB = re.compile(r"[*?\[]")
"""The characters that are wildcards in DuckDB's file names. In brackets they match themselves."""


class TooSlowError(DataError):
    """A query exceeded its time limit."""


class StoredEvents:
    """The events below a directory. Safe to use from many threads."""

    def __init__(
        self, directory: Path, *, num_threads: int | None = None, memory_limit_bytes: int = MEMORY_LIMIT_BYTES
    ) -> None:
        self._catalog = Catalog(directory)
        self._num_threads = num_threads or os.cpu_count() or 1
        self._memory_limit_bytes = memory_limit_bytes
        self._most_answer_bytes = memory_limit_bytes // 2
        self._lock = threading.Lock()
        self._database: duckdb.DuckDBPyConnection | None = None

    @property
    def directory(self) -> Path:
        return self._catalog.directory

    def check_not_empty(self) -> None:
        """Raise DataError when the directory has no segments."""
        if self._catalog.is_empty():
            raise DataError(f"{self.directory}: no segments of events below it; was anything streamed?")

    def read(self, kind: type[TableType], where: Where = ALL) -> TableType:
        """Return the rows without duplicates, ordered by (round, rank, sequence) if the table has these columns.

        Damaged files are left out and reported by `problems`; if no file is left, the table is empty.
        Raises: DataError when intact files cannot be read, keep changing, or hold too large an answer.
        """
        columns = ", ".join(_selected(name) for name in columns_of(kind))
        conditions, values = sql_conditions(kind, where)
        found = self.query(kind, where, f"SELECT {columns} FROM segments WHERE {conditions}", values)
        if found is None:
            return joined(kind, [])
        table = from_arrow(kind, found)
        for name in columns_of(kind):
            if names_of(name) is not None and np.any(getattr(table, name) == NOT_KNOWN):
                self._catalog.record_problem(
                    f"{kind.NAME}: contains rows of a newer version of megatrain with an unknown {name}"
                )
        return in_order(table)

    def step_bounds(self, kind: type[Table], where: Where) -> tuple[int, int] | None:
        """Return the first and the last step from the footers of the files; None: no file has steps.

        The files may have rows that do not match `where`, so the exact bounds may be narrower. Raises: DataError.
        """
        found = [segment.bounds.get("step") for segment in self._catalog.segments(kind, where) if segment.num_rows]
        known = [bound for bound in found if bound is not None]
        return (min(bound[0] for bound in known), max(bound[1] for bound in known)) if known else None

    def problems(self) -> tuple[str, ...]:
        """Return a sentence for each problem found so far: bad files, unknown names, and times in the future."""
        return self._catalog.problems()

    def query(
        self, kind: type[Table], where: Where, sql: str, values: Sequence[Any] = (), *, timeout_s: float | None = None
    ) -> pa.Table | None:
        """Run SQL on the view `segments`: all rows of the files that may contain rows matching `where`.

        These files have other rows too, so `sql` must contain the conditions of `where`. `values`: $1, $2, ... in the
        query. Returns None if there are no such files.
        Raises: DataError; TooSlowError when there is no answer after `timeout_s`.
        """
        for _ in range(_NUM_TRIES):
            try:
                segments = self._catalog.intact(self._catalog.segments(kind, where))
            except FileNotFoundError:
                continue
            if not segments:
                return None
            files = [_GLOB.sub(r"[\g<0>]", str(segment.path)) for segment in segments]
            source = f"SELECT * FROM read_parquet(${len(values) + 1}, hive_partitioning = false)"
            is_late = threading.Event()
            try:
                cursor = self._cursor()
                with cursor, _interrupted(cursor, timeout_s, is_late):
                    asked = cursor.sql(f"WITH segments AS ({source}) {sql}", params=[*values, files])
                    return self._answer(asked)
            except (duckdb.Error, OSError) as error:  # an OSError can occur in the middle of an answer
                if is_late.is_set():
                    raise TooSlowError(f"{self.directory}: no answer within {timeout_s:g} s") from error
                self._explain(segments, error)
        raise DataError(f"{self.directory}: segments of {kind.NAME} changed during each of {_NUM_TRIES} reads")

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        """Return a cursor. The first query opens the database, because opening takes 30 ms and may not be needed."""
        with self._lock:
            if self._database is None:
                self._database = _open_database(self._num_threads, self._memory_limit_bytes)
            return self._database.cursor()

    def _answer(self, asked: duckdb.DuckDBPyRelation) -> pa.Table:
        """Return all rows of the answer. Raises: DataError when they exceed half of DuckDB's memory limit."""
        batches = asked.to_arrow_reader(_ANSWER_ROWS)
        taken: list[pa.RecordBatch] = []
        num_bytes = 0
        for batch in batches:
            taken.append(batch)
            num_bytes += batch.nbytes
            if num_bytes > self._most_answer_bytes:
                most = self._most_answer_bytes // 10**6
                raise DataError(f"{self.directory}: the answer has more than {most} MB; ask for fewer steps or ranks")
        return pa.Table.from_batches(taken, schema=batches.schema)

    def _explain(self, segments: Sequence[Segment], error: Exception) -> None:
        """Exclude damaged files from the next try. Raises: DataError if no file is missing or damaged."""
        gone = [segment for segment in segments if not segment.path.exists()]
        broken = {} if gone else {segment.path: fault for segment in segments if (fault := _fault_of(segment))}
        for path, fault in broken.items():
            self._catalog.set_aside(path, f"{fault}; it was set aside")
        if not gone and not broken:
            raise DataError(f"{self.directory}: events cannot be read: {error}") from error


def _open_database(num_threads: int, memory_limit_bytes: int) -> duckdb.DuckDBPyConnection:
    """Return a database in memory that knows the names of operations and kinds."""
    database = duckdb.connect(
        ":memory:",
        config={
            "threads": num_threads,
            "memory_limit": f"{memory_limit_bytes}B",
            # no extension is downloaded, and no temporary file is written
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "temp_directory": "",
        },
    )
    database.execute("SET parquet_metadata_cache = true")
    database.execute("SET enable_progress_bar = false")  # the bar would mix with the output of commands
    for column in ("operation", "kind"):
        names = ", ".join(f"'{name}'" for name in names_of(column) or ())
        database.execute(f"CREATE TYPE {column}_name AS ENUM ({names})")
    return database


@contextmanager
def _interrupted(
    cursor: duckdb.DuckDBPyConnection, timeout_s: float | None, is_late: threading.Event
) -> Iterator[None]:
    """Interrupt the query in the block after `timeout_s`, and set `is_late`; None: no timeout."""
    if timeout_s is None:
        yield
        return
    has_ended = threading.Event()

    def interrupt() -> None:
        wait_s = max(0.0, timeout_s)
        while not has_ended.wait(wait_s):
            is_late.set()
            cursor.interrupt()
            wait_s = _INTERRUPT_AGAIN_S  # an interrupt before the query has begun has no effect

    thread = threading.Thread(target=interrupt, name="deadline of a query", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def sql_conditions(kind: type[Table], where: Where) -> tuple[str, list[Any]]:
    """Return `where` as an SQL condition with parameters $1, $2, ..., and the values of the parameters."""
    has = columns_of(kind)
    parts: list[str] = []
    values: list[Any] = []
    for column, wanted in (("round", where.rounds), ("rank", where.ranks)):
        if wanted is not None and column in has:
            parts.append(_among(column, wanted))
    for column, texts in (("operation", _operation_names(where)), ("host", where.hosts)):
        if texts is not None and column in has:
            places = [f"${len(values) + number}" for number in range(1, len(texts) + 1)]
            parts.append(f"{column} IN ({', '.join(places)})" if texts else "1 = 0")
            values.extend(texts)
    time = time_column(kind)
    for name, least, most in (("step", where.first_step, where.last_step), (time, where.first_ns, where.last_ns)):
        if name in has and least is not None:
            parts.append(f"{name} >= {int(least)}")
        if name in has and most is not None:
            parts.append(f"{name} <= {int(most)}")
    return " AND ".join(parts) or "1 = 1", values


def _among(column: str, wanted: tuple[int, ...]) -> str:
    chosen = sorted({int(value) for value in wanted})
    if not chosen:
        return "1 = 0"
    bounds = f"{column} BETWEEN {chosen[0]} AND {chosen[-1]}"  # DuckDB skips row groups by this condition
    if chosen[-1] - chosen[0] + 1 == len(chosen):
        return bounds
    return f"{bounds} AND {column} IN ({', '.join(map(str, chosen))})"


def _operation_names(where: Where) -> tuple[str, ...] | None:
    names = names_of("operation")
    assert names is not None
    if where.operations is None:
        return None
    return tuple(names[number] for number in where.operations if 0 <= number < len(names))


def _selected(column: str) -> str:
    """Return the SQL of a column; a column of names is cast to an enumeration, so that it is read as numbers."""
    names = names_of(column)
    if names is None:
        return f'"{column}"'
    return f"coalesce(TRY_CAST({column} AS {column}_name), '{names[NOT_KNOWN]}'::{column}_name) AS {column}"


def _fault_of(segment: Segment) -> str:
    try:
        return damage_of_rows(segment)
    except FileNotFoundError:
        return "no longer exists"


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

    `megatrain.read_run(...).events(...)` calls this function.
    None: no limit. A limit on a column that the table lacks has no effect. Operations and kinds are names. If the
    directory does not exist, the table is empty.
    Raises: NotFoundError for an unknown table; DataError when intact files cannot be read, keep changing, or hold too
    large an answer.
    """
    kind: Any = table_named(table)  # a type variable cannot stand for a union of classes
    if kind is None:
        raise NotFoundError(f"table {table!r} of events; the tables are {', '.join(kind.NAME for kind in TABLES)}")
    if not directory.exists():
        return to_stored(kind, to_arrow(joined(kind, []))), ()
    events = StoredEvents(directory)
    rows = events.read(kind, Where(rounds=rounds, ranks=ranks, first_step=first_step, last_step=last_step))
    return to_stored(kind, to_arrow(rows)), events.problems()
