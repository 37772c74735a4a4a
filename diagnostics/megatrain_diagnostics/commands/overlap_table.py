"""Exposed and overlapped communication by kind, as a table and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatrain.commands.printing import table
from megatrain_diagnostics.analysis.overlap import Overlap


def overlap_table(title: str, found: Sequence[Overlap]) -> list[str]:
    """Return the lines of a table: mean times per rank and step."""
    rows = [(title, "count", "total", "exposed", "of it waiting", "overlapped", "elsewhere", "share overlapped")]
    rows += [
        (
            *(one.operation, f"{one.count / one.num_windows:.1f}", _bound(one, _ms(one, one.total_ns))),
            *(_ms(one, one.exposed_ns), _ms(one, one.waiting_ns), _bound(one, _ms(one, one.overlapped_ns))),
            *(_ms(one, one.elsewhere_ns), overlapped_share(one)),
        )
        for one in found
    ]
    lines = table(rows, left=(0,))
    if any(one.is_at_most for one in found):
        lines.append(
            "<= at most: the exact end of some operations is not known, only the time at which the rank observed it"
        )
    return lines


def overlapped_share(one: Overlap) -> str:
    """Return the share of the time that is overlapped with compute, and whether it is an upper bound."""
    return _bound(one, f"{one.overlapped_percent:.1f} %")


def overlap_document(one: Overlap) -> dict[str, Any]:
    """Return the figures for JSON, where overlapped time has the name hidden."""
    figures = asdict(one)
    figures["hidden_ns"] = figures.pop("overlapped_ns")
    return {**figures, "elsewhere_ns": one.elsewhere_ns, "hidden_percent": one.overlapped_percent}


def _bound(one: Overlap, text: str) -> str:
    return f"<= {text}" if one.is_at_most else text


def _ms(one: Overlap, amount_ns: int) -> str:
    return f"{amount_ns / one.num_windows / 1e6:,.3f} ms"
