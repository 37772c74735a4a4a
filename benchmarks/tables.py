"""Markdown tables."""

from __future__ import annotations

import statistics
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


def spread(values: Sequence[float | None]) -> str:
    """Return the median and the range of the values that are known, and how many are not."""
    known = [value for value in values if value is not None]
    if not known:
        return "never" if values else ""
    missing = f", {len(values) - len(known)} never" if len(known) < len(values) else ""
    return f"{statistics.median(known):.2f} ({min(known):.2f} to {max(known):.2f}{missing})"
