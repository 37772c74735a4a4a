"""Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows, which have the same keys, as a Markdown table."""
    header = list(rows[0])
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell(row[key]) for key in header) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: object) -> str:
    """Return a value as text: floats with four digits, integers with commas, None as nothing."""
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
