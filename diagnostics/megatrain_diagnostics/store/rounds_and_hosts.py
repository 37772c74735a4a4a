"""Queries which rounds and hosts a store has, and which steps a table covers, by aggregation in SQL."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import NUMBERING_AXES
from megatrain_diagnostics.events.roster import Roster, make_roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Clocks, Groups, Ranks, Table, num_rows
from megatrain_diagnostics.store.reader import ALL, StoredEvents, sql_conditions

_HOUR_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """A round as reported by ranks. `began_unix_s`: when the first of these ranks opened its black box."""

    number: int
    num_ranks: int
    """Number of ranks that reported."""
    world_size: int
    began_unix_s: float

    @property
    def is_confirmed(self) -> bool:
        """Whether at least half of the round's ranks reported it: a single rank may report a wrong number."""
        return 2 * self.num_ranks >= self.world_size


def rounds_seen(events: StoredEvents) -> tuple[RoundSeen, ...]:
    """Return all rounds that ranks reported, the oldest first. Raises: DataError."""
    product = " * ".join(f"CAST({axis.size_name} AS DOUBLE)" for axis in NUMBERING_AXES)
    sizes = f"median({product})"
    found = events.query(
        Ranks,
        ALL,
        f"SELECT round, count(DISTINCT rank) AS num_ranks, {sizes} AS world_size, min(at_ns) AS at_ns"
        " FROM segments GROUP BY round ORDER BY round",
    )
    if found is None:
        return ()
    return tuple(
        RoundSeen(int(row["round"]), int(row["num_ranks"]), int(row["world_size"]), row["at_ns"] / 1e9)
        for row in found.to_pylist()
    )


def shown_round(seen: tuple[RoundSeen, ...]) -> RoundSeen | None:
    """Return the newest confirmed round, or else the newest round, as events.roster.newest_round does."""
    confirmed = [round_ for round_ in seen if round_.is_confirmed]
    return (confirmed or seen)[-1] if seen else None


def roster_of(events: StoredEvents, round_number: int) -> Roster:
    """Return the roster of a round. Raises: DataError if no rank reported the round."""
    where = Where(rounds=(round_number,))
    ranks = events.read(Ranks, where)
    if not num_rows(ranks):
        known = ", ".join(str(round_.number) for round_ in rounds_seen(events)) or "none"
        raise DataError(f"round={round_number}: no rank reported it; there are {known}")
    return make_roster(ranks, events.read(Groups, where), round_number)


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """The least and the greatest step of some rows, and the number of different ranks in them."""

    first: int
    last: int
    num_ranks: int


def steps_ahead(events: StoredEvents, kind: type[Table], where: Where) -> StepsAhead | None:
    """Return the range of steps of matching rows in a table; None if there are none. Raises: DataError."""
    conditions, values = sql_conditions(kind, where)
    found = events.query(
        kind,
        where,
        f"SELECT min(step) AS first, max(step) AS last, count(DISTINCT rank) AS ranks FROM segments WHERE {conditions}",
        values,
    )
    row = None if found is None else found.to_pylist()[0]
    return None if row is None or row["first"] is None else StepsAhead(row["first"], row["last"], row["ranks"])


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
    """Return the rounds in which ranks of a host reported. Raises: DataError."""
    where = Where(hosts=(host,))
    conditions, values = sql_conditions(Ranks, where)
    sql = f"SELECT DISTINCT round FROM segments WHERE {conditions} ORDER BY round"
    found = events.query(Ranks, where, sql, values)
    return () if found is None else tuple(found.column(0).to_pylist())


def last_rounds(events: StoredEvents) -> dict[str, int]:
    """Return host -> the newest round in which its ranks reported. Raises: DataError."""
    found = events.query(Ranks, ALL, "SELECT host, max(round) AS number FROM segments GROUP BY host")
    return {} if found is None else {row["host"]: row["number"] for row in found.to_pylist()}


def newest_clocks(events: StoredEvents, now_ns: int | None = None) -> dict[str, tuple[float, float]]:
    """Return host -> (offset, error) in seconds of the newest comparison of its clock with the daemon's.

    `now_ns`: use only comparisons of the hour before it; None: of any time. Raises: DataError.
    """
    where = ALL if now_ns is None else Where(first_ns=now_ns - _HOUR_NS)
    conditions, values = sql_conditions(Clocks, where)
    newest = "arg_max(offset_ns, at_ns) AS offset_ns, arg_max(error_ns, at_ns) AS error_ns"
    found = events.query(Clocks, where, f"SELECT host, {newest} FROM segments WHERE {conditions} GROUP BY host", values)
    if found is None:
        return {}
    return {row["host"]: (row["offset_ns"] / 1e9, row["error_ns"] / 1e9) for row in found.to_pylist()}
