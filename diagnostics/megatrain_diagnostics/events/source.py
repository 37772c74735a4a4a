"""The interface by which analyses read events; a store implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatrain_diagnostics.events.rows import begins_run
from megatrain_diagnostics.events.tables import (
    NO_DURATION,
    Selection,
    Table,
    TableType,
    columns_of,
    num_rows,
    select,
)


@dataclass(frozen=True, slots=True)
class Where:
    """Conditions on rows. None: no condition. A condition on a column that a table lacks has no effect."""

    rounds: tuple[int, ...] | None = None
    first_step: int | None = None
    last_step: int | None = None
    """Inclusive."""
    ranks: tuple[int, ...] | None = None
    operations: tuple[int, ...] | None = None
    """Numbers of operations."""
    hosts: tuple[str, ...] | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    """Bounds of `at_ns` or `start_ns`, unix ns, inclusive."""


class EventSource(Protocol):
    """A store of events, or events in memory."""

    def read(self, kind: type[TableType], where: Where = Where()) -> TableType:
        """Return the rows without duplicates, ordered by (round, rank, sequence) if the table has these columns.

        Raises: DataError when nothing can be read; damaged parts are left out and reported by `problems`.
        """

    def problems(self) -> tuple[str, ...]:
        """Return a sentence for each damaged or foreign file found so far."""


def matching(table: Table, where: Where) -> Selection:
    """Return the mask of the rows that fulfill all conditions."""
    chosen = np.ones(num_rows(table), dtype=bool)
    has = columns_of(type(table))

    def keep_in(name: str, values: tuple[Any, ...] | None) -> None:
        if values is not None and name in has:
            chosen[~np.isin(getattr(table, name), values)] = False

    keep_in("round", where.rounds)
    keep_in("rank", where.ranks)
    keep_in("operation", where.operations)
    keep_in("host", where.hosts)
    time = "start_ns" if "start_ns" in has else "at_ns"
    for name, least, most in (("step", where.first_step, where.last_step), (time, where.first_ns, where.last_ns)):
        if name in has and least is not None:
            chosen &= getattr(table, name) >= least
        if name in has and most is not None:
            chosen &= getattr(table, name) <= most
    return chosen


def in_order(table: TableType) -> TableType:
    """Return the rows sorted by (round, rank, sequence), without duplicates of this key."""
    has = columns_of(type(table))
    keys = [name for name in ("sequence", "rank", "round") if name in has]
    if "sequence" not in keys or not num_rows(table):
        return table
    columns: list[Any] = [getattr(table, name) for name in keys]
    duration = "duration_ns"
    if duration in has:  # a span may be sent while it is open and again when it has ended: keep the ended row
        columns.insert(0, getattr(table, duration) == NO_DURATION)
    order = np.lexsort(columns)
    ordered = select(table, order)
    is_new = begins_run(*(getattr(ordered, name) for name in keys))
    return ordered if is_new.all() else select(ordered, is_new)
