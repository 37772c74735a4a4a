"""Small queries about hosts, of large tables in SQL: hosts of ranks, rounds, offsets of clocks."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Clocks, Ranks
from megatrain_diagnostics.store.reader import ALL, StoredEvents, sql_conditions

_HOUR_NS = 3600 * 10**9


def hosts_of_ranks(events: StoredEvents, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Return the host of each known (round, rank). Raises: DataError."""
    wanted = set(places)
    if not wanted:
        return {}
    where = Where(
        rounds=tuple(sorted({round_number for round_number, _ in wanted})),
        ranks=tuple(sorted({rank for _, rank in wanted})),
    )
    table = events.read(Ranks, where)
    found = zip(table.round.tolist(), table.rank.tolist(), table.host.tolist(), strict=True)
    return {(round_number, rank): host for round_number, rank, host in found if (round_number, rank) in wanted}


def rounds_of_host(events: StoredEvents, host: str) -> tuple[int, ...]:
    """Return the rounds in which ranks of a host sent their records. Raises: DataError."""
    where = Where(hosts=(host,))
    conditions, values = sql_conditions(Ranks, where)
    sql = f"SELECT DISTINCT round FROM segments WHERE {conditions} ORDER BY round"
    found = events.query(Ranks, where, sql, values)
    return () if found is None else tuple(found.column(0).to_pylist())


def last_rounds(events: StoredEvents) -> dict[str, int]:
    """Return the newest round in which ranks of each host sent their records. Raises: DataError."""
    found = events.query(Ranks, ALL, "SELECT host, max(round) AS number FROM segments GROUP BY host")
    return {} if found is None else {row["host"]: row["number"] for row in found.to_pylist()}


def newest_clocks(events: StoredEvents, now_ns: int | None = None) -> dict[str, tuple[float, float]]:
    """Return the newest comparison of each host's clock with the daemon's: (offset, error) in seconds.

    `now_ns`: only comparisons of the last hour count; None: those of all times. Raises: DataError.
    """
    where = ALL if now_ns is None else Where(first_ns=now_ns - _HOUR_NS)
    conditions, values = sql_conditions(Clocks, where)
    newest = "arg_max(offset_ns, at_ns) AS offset_ns, arg_max(error_ns, at_ns) AS error_ns"
    found = events.query(Clocks, where, f"SELECT host, {newest} FROM segments WHERE {conditions} GROUP BY host", values)
    if found is None:
        return {}
    return {row["host"]: (row["offset_ns"] / 1e9, row["error_ns"] / 1e9) for row in found.to_pylist()}
