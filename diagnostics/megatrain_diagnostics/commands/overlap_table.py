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
            *(overlap.operation, f"{overlap.count / overlap.num_windows:.1f}"),
            *(_bound(overlap, _ms(overlap, overlap.total_ns)), _ms(overlap, overlap.exposed_ns)),
            *(_ms(overlap, overlap.waiting_ns), _bound(overlap, _ms(overlap, overlap.overlapped_ns))),
            *(_ms(overlap, overlap.elsewhere_ns), overlapped_share(overlap)),
        )
        for overlap in found
    ]
    lines = table(rows, left=(0,))
    if any(overlap.is_at_most for overlap in found):
        lines.append(
            "<= at most: the exact end of some operations is not known, only the time at which the rank observed it"
        )
    return lines


def overlapped_share(overlap: Overlap) -> str:
    """Return the share of the time that is overlapped with compute, and whether it is an upper bound."""
    return _bound(overlap, f"{overlap.overlapped_percent:.1f} %")


def overlap_document(overlap: Overlap) -> dict[str, Any]:
    """Return the figures for JSON, where overlapped time has the name hidden."""
    figures = asdict(overlap)
    figures["hidden_ns"] = figures.pop("overlapped_ns")
    return {**figures, "elsewhere_ns": overlap.elsewhere_ns, "hidden_percent": overlap.overlapped_percent}


def _bound(overlap: Overlap, text: str) -> str:
    return f"<= {text}" if overlap.is_at_most else text


def _ms(overlap: Overlap, amount_ns: int) -> str:
    return f"{amount_ns / overlap.num_windows / 1e6:,.3f} ms"
