"""Numbers, times and tables, as all verbs of `megatrain` print them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from megatrain.contracts.printable import printable

SCHEMA_VERSION = 1
_MAX_LINE = 200


def print_json(values: Mapping[str, Any]) -> None:
    """Print one object with a schema version."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=2), flush=True)


def print_lines(lines: Sequence[str]) -> None:
    """Print text that may hold what files and hosts say of themselves."""
    print(printable("\n".join(lines)), flush=True)


def print_note(text: str) -> None:
    """Print to stderr what is beside the result."""
    print(f"megatrain: {printable(text)}", file=sys.stderr, flush=True)


def bytes_text(num_bytes: int) -> str:
    """Return "1.23 GB"; units are powers of 1000, as those of disks."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{num_bytes} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} PB"


def seconds_text(seconds: float) -> str:
    """Return a duration: "80 ms", "3.2 s", "12 min", "3 h 12 min"."""
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, hours, days = round(seconds / 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 60:
        return f"{minutes} min"
    return f"{hours} h {int(seconds // 60) % 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def age_text(unix_s: float, now_s: float) -> str:
    """Return how long ago a moment was, in whole seconds: "3 s", "12 min"."""
    age_s = max(0.0, now_s - unix_s)
    return f"{age_s:.0f} s" if age_s < 59.5 else seconds_text(age_s)


def time_text(unix_s: float) -> str:
    """Return a moment as UTC."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # some host's clock is out of its mind
        return f"{unix_s:.0f} s after 1970"


def short(text: str, longest: int = _MAX_LINE) -> str:
    """Return text on one line, cut where it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 3] + "..."


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
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {value}" for name, value in pairs]
