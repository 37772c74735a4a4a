"""Searches the log lines of all ranks in the store, newest first, with DuckDB.

Regular expressions are RE2's: the time of a match is linear in the length of the line, so that no query can hang the
server. An expression that needs backtracking (look-ahead, back-references) is refused. A query stops at its deadline;
its result is then marked as partial. Plain text is matched regardless of case.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.columns.schema import from_arrow
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import LogLines, columns_of, joined, select
from megatrain_diagnostics.store.reader import ALL, StoredEvents, TooSlowError, sql_conditions
from megatrain_diagnostics.store.rounds_and_hosts import rounds_seen, shown_round

_FIRST_WINDOW_NS = 600 * 10**9
_GROWTH = 4
_MAX_PATTERN = 500


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Conditions on log lines. Empty `text`: all lines."""

    round: int
    text: str = ""
    is_regex: bool = False
    ranks: tuple[int, ...] | None = None
    hosts: tuple[str, ...] | None = None
    limit: int = 500
    first_ns: int | None = None
    last_ns: int | None = None
    """Bounds of the lines' times, unix ns, inclusive."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundLines:
    """The newest matching lines, at most `limit`, in order of time. `is_partial`: older lines were not searched."""

    lines: LogLines
    num_matching: int
    num_searched: int
    is_partial: bool


def pattern_problem(text: str) -> str:
    """Return why a text is not a valid regular expression; "" if it is valid."""
    if len(text) > _MAX_PATTERN:
        return f"{len(text)} characters; at most {_MAX_PATTERN}"
    try:
        with duckdb.connect(":memory:") as connection:
            connection.execute("SELECT regexp_matches('', ?)", [text]).fetchall()
    except duckdb.Error as error:
        return str(error).partition("\n")[0]
    return ""


def logged_round(events: StoredEvents, round_number: int | None) -> int:
    """Return `round_number` if it has log lines; None: return the round of `shown_round`, or a later one.

    A later round is one with lines that failed before its ranks reported.
    Raises: DataError if `round_number` has no log lines; with None, only if no round has any.
    """
    found = events.query(LogLines, ALL, "SELECT DISTINCT round FROM segments ORDER BY round")
    logged = set() if found is None else set(found.column(0).to_pylist())
    if not logged:
        raise DataError(f"{events.directory}: no line of output was streamed")
    if round_number is None:
        shown = shown_round(rounds_seen(events))
        newest = max(logged) if shown is None else shown.number
        while newest + 1 in logged:
            newest += 1
        return newest
    if round_number not in logged:
        there = ", ".join(map(str, sorted(logged)))
        raise DataError(f"round={round_number}: no line of its output was streamed; the rounds with lines are {there}")
    return round_number


def search_lines(events: StoredEvents, query: LogQuery, *, budget_s: float) -> FoundLines:
    """Return the newest lines that match. Raises: DataError."""
    deadline_s = time.monotonic() + budget_s
    where = Where(
        (query.round,), ranks=query.ranks, hosts=query.hosts, first_ns=query.first_ns,
        last_ns=query.last_ns,
    )  # fmt: skip
    parts: list[LogLines] = []
    num_matching = num_searched = num_found = 0
    try:
        times = _times(events, where, deadline_s)
        if times is None:
            return FoundLines(no_lines(), 0, 0, False)
        first_ns, last_ns = times
        window_ns = _FIRST_WINDOW_NS
        while last_ns >= first_ns:
            begin_ns = max(first_ns, last_ns - window_ns)
            if time.monotonic() >= deadline_s:
                raise TooSlowError("the time limit is reached")
            within = Where(where.rounds, ranks=where.ranks, hosts=where.hosts, first_ns=begin_ns, last_ns=last_ns)
            searched, matching, lines = _in_window(events, query, within, query.limit - num_found, deadline_s)
            num_searched, num_matching = num_searched + searched, num_matching + matching
            num_found += len(lines.rank)
            parts.append(lines)
            last_ns, window_ns = begin_ns - 1, window_ns * _GROWTH
    except TooSlowError:
        return FoundLines(_in_time(parts), num_matching, num_searched, True)
    return FoundLines(_in_time(parts), num_matching, num_searched, False)


def newest_tails(events: StoredEvents, where: Where, most_lines: int, *, num_ranks: int, budget_s: float) -> LogLines:
    """Return the newest lines of each rank: `most_lines` // `num_ranks` of each, but at least one.

    Raises: DataError; TooSlowError when they cannot be read within `budget_s`.
    """
    each = max(1, most_lines // max(1, num_ranks))
    conditions, values = sql_conditions(LogLines, where)
    sql = (
        f"SELECT {', '.join(columns_of(LogLines))} FROM segments WHERE {conditions}"
        f" QUALIFY row_number() OVER (PARTITION BY rank ORDER BY sequence DESC) <= {each}"
    )
    found = events.query(LogLines, where, sql, values, timeout_s=budget_s)
    return no_lines() if found is None else from_arrow(LogLines, found)


def newest_lines(events: StoredEvents, where: Where, most: int, *, budget_s: float) -> LogLines:
    """Return the newest lines that match `where`, in order of time. Raises: DataError; TooSlowError."""
    conditions, values = sql_conditions(LogLines, where)
    found = _newest(events, where, conditions, values, most, budget_s)
    return no_lines() if found is None else _in_time([found])


def _times(events: StoredEvents, where: Where, deadline_s: float) -> tuple[int, int] | None:
    conditions, values = sql_conditions(LogLines, where)
    sql = f"SELECT min(at_ns) AS first, max(at_ns) AS last FROM segments WHERE {conditions}"
    found = events.query(LogLines, where, sql, values, timeout_s=deadline_s - time.monotonic())
    row = None if found is None else found.to_pylist()[0]
    return None if row is None or row["first"] is None else (row["first"], row["last"])


def _in_window(
    events: StoredEvents, query: LogQuery, where: Where, limit: int, deadline_s: float
) -> tuple[int, int, LogLines]:
    conditions, values = sql_conditions(LogLines, where)
    match, wanted = _match(query, len(values) + 1)
    counts = events.query(
        LogLines, where, f"SELECT count(*) AS n, count(*) FILTER (WHERE {match}) AS m FROM segments WHERE {conditions}",
        [*values, *wanted], timeout_s=deadline_s - time.monotonic(),
    )  # fmt: skip
    if counts is None:
        return 0, 0, no_lines()
    row = counts.to_pylist()[0]
    if not row["m"] or limit <= 0:
        return row["n"], row["m"], no_lines()
    left_s = deadline_s - time.monotonic()
    found = _newest(events, where, f"{conditions} AND {match}", [*values, *wanted], limit, left_s)
    if found is None:
        raise DataError(f"{events.directory}: lines expired during the search")
    return row["n"], row["m"], found


def _newest(
    events: StoredEvents, where: Where, conditions: str, values: list[Any], most: int, timeout_s: float
) -> LogLines | None:
    """Return the newest lines that fulfill SQL conditions, the newest first; None: there are no files."""
    sql = (
        f"SELECT {', '.join(columns_of(LogLines))} FROM segments WHERE {conditions}"
        f" ORDER BY at_ns DESC, rank DESC, sequence DESC LIMIT {most}"
    )
    found = events.query(LogLines, where, sql, values, timeout_s=timeout_s)
    return None if found is None else from_arrow(LogLines, found)


def _match(query: LogQuery, place: int) -> tuple[str, list[Any]]:
    if not query.text:
        return "true", []
    if query.is_regex:
        return f"regexp_matches(line, ${place})", [query.text]
    return f"contains(lower(line), lower(${place}))", [query.text]


def _in_time(parts: list[LogLines]) -> LogLines:
    lines = joined(LogLines, parts)
    # remove duplicates of lines that were stored twice
    _, once = np.unique(np.stack([lines.rank.astype(np.int64), lines.sequence]), axis=1, return_index=True)
    lines = select(lines, once)
    return select(lines, np.lexsort((lines.sequence, lines.rank, lines.at_ns)))


def no_lines() -> LogLines:
    """Return an empty table of log lines."""
    return joined(LogLines, [])
