"""Numbers, times and tables as the verbs of `megatrain ckpt` print them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from megatrain.contracts.printable import printable

SCHEMA_VERSION = 1


def print_json(values: Mapping[str, Any]) -> None:
    """Print one object with a schema version."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=2))


def print_lines(lines: Sequence[str]) -> None:
    """Print text that may hold what files say."""
    print(printable("\n".join(lines)))


def print_note(text: str) -> None:
    """Print to stderr what is beside the result."""
    print(f"megatrain: {printable(text)}", file=sys.stderr)


def bytes_text(num_bytes: int) -> str:
    """Return "1.23 GB"; units are powers of 1000, as those of disks."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{num_bytes} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} PB"


def age_text(unix_s: float) -> str:
    """Return how long ago a moment was: "3 h 12 min"."""
    age_s = max(0.0, time.time() - unix_s)
    if age_s < 60:
        return f"{age_s:.0f} s"
    minutes, hours, days = int(age_s // 60), int(age_s // 3600), int(age_s // 86400)
    if minutes < 60:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def time_text(unix_s: float) -> str:
    """Return a moment as UTC."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns; `left` are the numbers of those that begin at the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def facts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return names and values, a line each, values aligned."""
    width = max(len(name) for name, _ in pairs)
    return [f"{name:<{width}}  {value}" for name, value in pairs]
