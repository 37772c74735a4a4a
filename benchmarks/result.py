"""The result of a benchmark: printed as tables, and stored as JSON and Markdown with date, machine and command.

`summary.py` makes the one table of all benchmarks from the stored results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar
from benchmarks.machine import machine, reference_ms
from benchmarks.summary import write_summary
from benchmarks.tables import cell, table

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks"


class MissingPartError(Exception):
    """A benchmark needs a part that is not installed. part: its name in MEGATRAIN_REQUIRE."""

    def __init__(self, part: str, problem: str) -> None:
        super().__init__(problem)
        self.part = part


@dataclass(frozen=True, slots=True)
class Result:
    """`rows`: dictionaries with the same keys. `notes`: what the figures mean and what they do not mean.

    `bars`: the limits of the figures. If one is missed, the command fails, and the page shows it.
    """

    name: str
    title: str
    command: str
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    bars: Sequence[Bar]
    settings: Mapping[str, Any] = field(default_factory=dict)


def publish(result: Result, *, is_written: bool) -> None:
    """Print the result. With is_written also write it to docs/benchmarks, replacing the previous one of this name."""
    print(f"\n{result.title}\n{table(result.rows)}")
    for note in result.notes:
        print(f"- {note}")
    for bar in result.bars:
        if not bar.is_met:
            print(f"BEYOND THE BAR: {bar.figure}: {cell(bar.row()['found'])}, where {bar.bar} is required")
    if not is_written:
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    date, facts = datetime.now(UTC).strftime("%Y-%m-%d"), {**machine(), "reference_ms": reference_ms()}
    record = {
        "name": result.name,
        "date": date,
        "command": result.command,
        "machine": facts,
        "settings": dict(result.settings),
        "rows": [dict(row) for row in result.rows],
        "bars": [bar.row() for bar in result.bars],
        "notes": list(result.notes),
    }
    (RESULTS / f"{result.name}.json").write_text(json.dumps(record, indent=2) + "\n")
    page = [
        f"# {result.title}",
        "",
        f"{date}, {', '.join(f'{key} {value}' for key, value in facts.items())}.",
        f"Command: `{result.command}`.",
        *(
            ["", "Settings: " + ", ".join(f"{k} {v}" for k, v in result.settings.items()) + "."]
            if result.settings
            else []
        ),
        "",
        table(result.rows),
        "",
        *([table([bar.row() for bar in result.bars]), ""] if result.bars else []),
        *(f"- {note}" for note in result.notes),
    ]
    (RESULTS / f"{result.name}.md").write_text("\n".join(page) + "\n")
    write_summary(RESULTS)
    print(f"written: {RESULTS / result.name}.md and .json")
