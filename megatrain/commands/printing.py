"""Output functions for all subcommands of `megatrain`: JSON, notes and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatrain.formatting import printable

SCHEMA_VERSION = 1


def print_json(values: Mapping[str, Any]) -> None:
    """Print one object with a schema version."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=2), flush=True)


def print_lines(lines: Sequence[str]) -> None:
    """Print lines with control characters escaped: they may contain text from files and hosts."""
    print(printable("\n".join(lines)), flush=True)


def print_result(values: Callable[[], Mapping[str, Any]], lines: Callable[[], Sequence[str]], *, is_json: bool) -> None:
    """Print a result as one JSON object, or as lines; only the printed form is made."""
    if is_json:
        print_json(values())
    else:
        print_lines(lines())


def print_note(text: str) -> None:
    """Print a message that is not part of the result to stderr."""
    print(f"megatrain: {printable(text)}", file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns. `left`: indices of the left-aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def facts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return names and values, one pair per line, with aligned values."""
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {value}" for name, value in pairs]
