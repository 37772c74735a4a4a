"""One table of all benchmarks for docs/benchmarks/README.md: the newest date of each, and whether its bars are met."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import cell, table

BEGIN, END = "<!-- bars: begin -->", "<!-- bars: end -->"


def write_summary(directory: Path) -> None:
    """Put the table of the results in `directory` between the two marks of its README.md."""
    readme = directory / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{summary(_records(directory))}\n{END}{after}")


def summary(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the table.

    Each missed bar has a row. Of the bars that a benchmark meets, the one that is closest to its limit has one.
    """
    return table([row for record in records for row in _rows(record)])


def _rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    bars: Sequence[Mapping[str, Any]] = record["bars"]
    missed, met = ([bar for bar in bars if bar["met"] == answer] for answer in ("no", "yes"))
    rows = [{"figure": bar["figure"], "found": cell(bar["found"]), "bar": bar["bar"], "met": "no"} for bar in missed]
    if met:
        bar = max(met, key=_part_of_limit)
        others = f" (the closest of {len(met)})" if len(met) > 1 else ""
        rows.append({"figure": bar["figure"] + others, "found": cell(bar["found"]), "bar": bar["bar"], "met": "yes"})
    elif not bars:
        rows.append({"figure": "no bar", "found": "", "bar": "", "met": ""})
    about = {"benchmark": f"[{record['name']}]({record['name']}.md)", "date": record["date"]}
    return [{**about, **row} for row in rows]


def _part_of_limit(bar: Mapping[str, Any]) -> float:
    """Return how close a met bar is to its limit: 1 at the limit, 0 for a statement that holds and a count of none."""
    sign, _, limit = bar["bar"].partition(" ")
    if not limit or not float(limit):
        return 0.0
    return float(bar["found"]) / float(limit) if sign == "<=" else float(limit) / float(bar["found"])


def _records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
