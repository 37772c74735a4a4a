"""Exposed and hidden communication by kind, as a table and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatrain.commands.printing import table
from megatrain_diagnostics.analysis.overlap import Overlap


def overlap_table(title: str, found: Sequence[Overlap]) -> list[str]:
    """Return the lines of a table: times of a rank and step, means."""
    rows = [(title, "count", "total", "exposed", "of it waiting", "hidden", "elsewhere", "share hidden")]
    rows += [
        (
            *(one.operation, f"{one.count / one.num_windows:.1f}", _bound(one, _ms(one, one.total_ns))),
            *(_ms(one, one.exposed_ns), _ms(one, one.waiting_ns), _bound(one, _ms(one, one.hidden_ns))),
            *(_ms(one, one.elsewhere_ns), hidden_share(one)),
        )
        for one in found
    ]
    lines = table(rows, left=(0,))
    if any(one.is_at_most for one in found):
        lines.append("<= at most: for some of it only the time when its rank looked is known, not its end")
    return lines


def hidden_share(one: Overlap) -> str:
    """Return the share of the time that compute hides, and whether it may be less."""
    return _bound(one, f"{one.hidden_percent:.1f} %")


def overlap_document(one: Overlap) -> dict[str, Any]:
    return {**asdict(one), "elsewhere_ns": one.elsewhere_ns, "hidden_percent": one.hidden_percent}


def _bound(one: Overlap, text: str) -> str:
    return f"<= {text}" if one.is_at_most else text


def _ms(one: Overlap, amount_ns: int) -> str:
    return f"{amount_ns / one.num_windows / 1e6:,.3f} ms"
