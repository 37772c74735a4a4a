"""The heat map as the page paints it: a row for each rank or host, a column for each step, one byte for each cell.

Rows are in the order in which they are shown. Where several ranks or steps share a row or column, it shows the greatest
value, so that one bad rank among 12,288 stays as bright as in a row of its own. Source: MegaScale sec. 5.1.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain_dashboard.api.heat.document import (
    HeatCellDocument,
    HeatOutlierDocument,
    HeatOutliersDocument,
)
from megatrain_dashboard.api.heat.order import BY_SCORE, By, arrange, rows_of
from megatrain_dashboard.api.heat.subject import Subject
from megatrain_dashboard.responses.binary import pack
from megatrain_dashboard.responses.document import layout_document
from megatrain_dashboard.sources.hosts import Hosts, hosts_of
from megatrain_diagnostics.analysis.candidates import least_score
from megatrain_diagnostics.analysis.findings import Thresholds
from megatrain_diagnostics.analysis.heat_scale import (
    NO_VALUE,
    NUM_LEVELS,
    Floats,
    PeerValues,
    Scale,
    codes,
    color_range,
    peer_values,
    pooled,
    scaled,
)
from megatrain_diagnostics.analysis.peers import Peers
from megatrain_diagnostics.events.roster import Roster

MAX_ROWS = 16_384
"""Above this number several ranks or hosts share a row; a screen has 2,000 lines."""
MAX_OUTLIERS = 20
_RISKY_FIRST = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of the color scale, where a request continues an earlier picture."""

    low: float
    high: float


@dataclass(frozen=True)
class HeatCells:
    """The values of a subject in some steps. Shapes: values [steps, ranks], in its unit; NaN: nothing is known.

    per_pass [steps, ranks]: factors that make the values of ranks with unequal numbers of micro-batches comparable.
    """

    roster: Roster
    peers: Peers
    subject: Subject
    first_step: int
    values: Floats
    per_pass: Floats | None = None

    @property
    def num_steps(self) -> int:
        return len(self.values)

    @cached_property
    def hosts(self) -> Hosts:
        return hosts_of(self.roster)

    @cached_property
    def against(self) -> PeerValues:
        """Return median and spread of each rank's peers, scaled to the rank's number of micro-batches."""
        if self.per_pass is None:
            return peer_values(self.values, self.peers)
        found = peer_values(self.values * self.per_pass, self.peers)
        return PeerValues(found.median / self.per_pass, found.spread / self.per_pass)

    @cached_property
    def z(self) -> Floats:
        return scaled(self.values, self.against, Scale.Z, self.subject.least_spread)

    def shown(self, scale: Scale) -> Floats:
        """Return the values that colors stand for. Shapes: [steps, ranks]."""
        if scale is Scale.ABSOLUTE:
            return self.values
        return self.z if scale is Scale.Z else scaled(self.values, self.against, scale, self.subject.least_spread)


def heat_picture(cells: HeatCells, scale: Scale, by: By, order: str, max_cells: int, ends: Ends | None = None) -> bytes:
    """Return the picture as a container of arrays: cells [rows, columns], with the ranks, hosts and steps of these."""
    z = cells.z if order == BY_SCORE else cells.values
    rows = arrange(cells.roster, cells.hosts, by, order, z)
    shown = rows_of(cells.shown(scale), by, cells.hosts)[:, rows.unit]
    per_row = -(-len(rows.unit) // MAX_ROWS)
    shown = pooled(shown, per_row, axis=1)
    per_column = max(1, -(-shown.size // max(max_cells, shown.shape[1])))
    shown = pooled(shown, per_column, axis=0)
    found = color_range(shown, scale)
    low, high = (found.low, found.high) if ends is None else (ends.low, ends.high)
    fields: dict[str, Any] = {
        "round": cells.roster.round,
        "layout": layout_document(cells.roster.layout).model_dump(),
        "operation": cells.subject.name,
        "measure": cells.subject.measure,
        "unit": cells.subject.unit,
        "scale": scale.value,
        "by": by.value,
        "sort": order,
        "first_step": cells.first_step,
        "last_step": cells.first_step + cells.num_steps - 1,
        "rows_per_bin": per_row,
        "steps_per_bin": per_column,
        "low": low,
        "high": high,
        "least": found.least,
        "greatest": found.greatest,
        "no_value": NO_VALUE,
        "num_levels": NUM_LEVELS,
        "hosts": list(cells.hosts.names),
        "group_labels": list(rows.group_labels),
    }
    rank = rows.rank[::per_row]
    arrays: dict[str, NDArray[Any]] = {
        "cells": codes(shown.T, low, high),
        "row_rank": rank.astype(np.int32),
        "row_host": cells.hosts.of_rank[rank].astype(np.int32),
        "column_step": (cells.first_step + np.arange(shown.shape[0]) * per_column).astype(np.int32),
        "group_begin": (rows.group_begin // per_row).astype(np.int32),
    }
    return pack(fields, arrays)


def heat_cell(cells: HeatCells, scale: Scale, by: By, rank: int, step: int, num_steps: int = 1) -> HeatCellDocument:
    """Return the exact value of one cell, which may stand for several steps or ranks.

    The value is from the step and rank with the greatest value on `scale`, which gives the cell its color.
    """
    ranks = np.array([rank])
    if by is By.HOST:
        ranks = np.flatnonzero(cells.hosts.of_rank == cells.hosts.of_rank[rank])
    first = step - cells.first_step
    place = slice(first, min(first + num_steps, cells.num_steps))
    shown = cells.shown(scale)[place][:, ranks]
    known = np.where(np.isnan(shown), -np.inf, shown)
    row, column = (int(found) for found in np.unravel_index(int(known.argmax()), known.shape))
    row, chosen = first + row, int(ranks[column])
    value = _number(cells.values[row, chosen])
    num_peers = int(cells.peers.num_peers[chosen])
    has_peers = num_peers > 0 and not np.isnan(cells.against.median[row, chosen])
    median = _number(cells.against.median[row, chosen]) if has_peers else None
    return HeatCellDocument(
        round=cells.roster.round,
        operation=cells.subject.name,
        measure=cells.subject.measure,
        rank=chosen,
        host=cells.roster.host_of(chosen),
        place=dict(cells.roster.coordinate(chosen)),
        step=cells.first_step + row,
        unit=cells.subject.unit,
        value=value,
        peers_median=median,
        peers_spread=_number(cells.against.spread[row, chosen]) if has_peers else None,
        num_peers=num_peers,
        ratio=value / median if value is not None and median else None,
        z=_number(cells.z[row, chosen]) if has_peers else None,
    )


def heat_outliers(cells: HeatCells, thresholds: Thresholds) -> HeatOutliersDocument:
    """Return the ranks that were farthest above their peers in a step, the farthest first.

    A z is the score of one step and operation. It is far if it reaches the score that a straggler has over many steps.
    """
    far_z = least_score(thresholds, cells.peers.num_ranks)
    found: list[HeatOutlierDocument] = []
    if cells.num_steps:
        z = np.where(np.isnan(cells.z) | (cells.peers.num_peers == 0), -np.inf, cells.z)
        worst_step = z.argmax(axis=0)
        worst = z[worst_step, np.arange(z.shape[1])]
        num_far = (z >= far_z).sum(axis=0)
        order = np.lexsort((np.arange(len(worst)), -num_far, -worst))[:MAX_OUTLIERS]
        found = [
            _outlier(cells, rank, int(worst_step[rank]), int(num_far[rank]))
            for rank in order.tolist()
            if np.isfinite(worst[rank]) and worst[rank] > 0.0
        ]
    return HeatOutliersDocument(
        round=cells.roster.round,
        operation=cells.subject.name,
        measure=cells.subject.measure,
        unit=cells.subject.unit,
        far_z=far_z,
        first_step=cells.first_step if cells.num_steps else None,
        last_step=cells.first_step + cells.num_steps - 1 if cells.num_steps else None,
        outliers=tuple(found),
    )


def heat_csv(cells: HeatCells, scale: Scale, by: By, order: str) -> Generator[str]:
    """Yield the picture as CSV with one line for each row and one column for each step; an empty cell is not known."""
    z = cells.z if order == BY_SCORE else cells.values
    rows = arrange(cells.roster, cells.hosts, by, order, z)
    shown = rows_of(cells.shown(scale), by, cells.hosts)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    steps = range(cells.first_step, cells.first_step + cells.num_steps)
    name = "rank" if by is By.RANK else "first rank"
    writer.writerow([name, "host", *cells.roster.layout.axes, *(f"step {step}" for step in steps)])
    for unit, rank in zip(rows.unit.tolist(), rows.rank.tolist(), strict=True):
        place = cells.roster.coordinate(rank).values()
        values = ["" if np.isnan(value) else f"{value:.9g}" for value in shown[:, unit]]
        writer.writerow([rank, safe_text(cells.roster.host_of(rank)), *place, *values])
        if text.tell() > 1 << 16:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
    yield text.getvalue()


def safe_text(text: str) -> str:
    """Return a text that no spreadsheet program takes for a formula."""
    return f"'{text}" if text.startswith(_RISKY_FIRST) else text


def _outlier(cells: HeatCells, rank: int, row: int, num_far: int) -> HeatOutlierDocument:
    value, median = float(cells.values[row, rank]), float(cells.against.median[row, rank])
    return HeatOutlierDocument(
        rank=rank,
        host=cells.roster.host_of(rank),
        place=dict(cells.roster.coordinate(rank)),
        step=cells.first_step + row,
        value=value,
        peers_median=median,
        ratio=value / median if median else None,
        z=float(cells.z[row, rank]),
        num_steps=num_far,
    )


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
