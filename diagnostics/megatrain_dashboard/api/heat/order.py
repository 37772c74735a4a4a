"""The order in which the heat map shows ranks or hosts, and their groups."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.layout import AXES
from megatrain_dashboard.sources.hosts import Hosts
from megatrain_diagnostics.analysis.heat_scale import Floats, Ints, pooled_by
from megatrain_diagnostics.events.roster import Roster, places_along


class By(StrEnum):
    """Whether a row is a rank or a host."""

    RANK = "rank"
    HOST = "host"


BY_RANK, BY_HOST, BY_SCORE = "rank", "host", "score"
ORDERS = (BY_RANK, BY_HOST, *(axis.name for axis in AXES), BY_SCORE)
"""The orders of rows. Rows that are ordered by host or by place along an axis are grouped too."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """The rows from top to bottom. `unit`: the rank or the host's index of each row; `rank`: its (first) rank."""

    unit: Ints
    rank: Ints
    group_begin: Ints
    """The rows at which groups begin; empty where rows are not grouped."""
    group_labels: tuple[str, ...]


def rows_of(values: Floats, by: By, hosts: Hosts) -> Floats:
    """Return the values by rank, or the greatest value of each host. Shapes: values [steps, ranks]; [steps, units]."""
    return values if by is By.RANK else pooled_by(values, hosts.of_rank, len(hosts.names))


def arrange(roster: Roster, hosts: Hosts, by: By, order: str, z: Floats) -> Arrangement:
    """Return the order of the rows. Shapes: z [steps, ranks]; only the order by score uses it."""
    ranks = np.arange(roster.layout.world_size)
    if by is By.HOST:
        _, ranks = np.unique(hosts.of_rank, return_index=True)
    unit = np.arange(len(ranks))
    if order == BY_SCORE:
        score = scores(rows_of(z, by, hosts))
        chosen = np.lexsort((ranks, -score))
        return Arrangement(unit[chosen], ranks[chosen], np.zeros(0, dtype=np.int64), ())
    if order == BY_RANK or (order == BY_HOST and by is By.HOST):
        chosen = np.argsort(ranks if order == BY_RANK else hosts.of_rank[ranks], kind="stable")
        return Arrangement(unit[chosen], ranks[chosen], np.zeros(0, dtype=np.int64), ())
    group_of = hosts.of_rank[ranks] if order == BY_HOST else places_along(roster.layout, order)[ranks]
    chosen = np.lexsort((ranks, group_of))
    group = group_of[chosen]
    begin = np.flatnonzero(np.concatenate(([True], np.diff(group) != 0)))
    labels = tuple(_label(order, int(group[row]), hosts) for row in begin)
    return Arrangement(unit[chosen], ranks[chosen], begin, labels)


def scores(z: Floats) -> NDArray[np.float64]:
    """Return how far each row usually is above its peers: the median over the steps, with 0 where it has no value."""
    if not len(z):
        return np.zeros(z.shape[1])
    return np.median(np.nan_to_num(z, nan=0.0), axis=0)


def _label(order: str, number: int, hosts: Hosts) -> str:
    if order == BY_HOST:
        return hosts.names[number] or "host not known"
    return f"{order} {number}"
