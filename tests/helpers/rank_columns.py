"""The columns of axes of all ranks of a layout, as a test's table of ranks has them."""

from __future__ import annotations

from megatrain.contracts.layout import Layout
from megatrain_diagnostics.events.tables import axis_values


def axis_columns(layout: Layout) -> dict[str, list[int]]:
    rows = [axis_values(layout, rank) for rank in range(layout.world_size)]
    return {name: [row[name] for row in rows] for name in rows[0]}
