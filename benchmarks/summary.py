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
    """Return the table. A missed bar has a row of its own; the bars that a benchmark meets share one."""
    return table([row for record in records for row in _rows(record)])


def _rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    bars: Sequence[Mapping[str, Any]] = record["bars"]
    missed = [bar for bar in bars if bar["met"] == "no"]
    num_met = len(bars) - len(missed)
    rows = [{"figure": bar["figure"], "found": cell(bar["found"]), "bar": bar["bar"], "met": "no"} for bar in missed]
    if num_met == 1:
        bar = next(bar for bar in bars if bar["met"] == "yes")
        rows.append({"figure": bar["figure"], "found": cell(bar["found"]), "bar": bar["bar"], "met": "yes"})
    elif num_met:
        rows.append({"figure": f"{'the other' if missed else 'all'} {num_met}", "found": "", "bar": "", "met": "yes"})
    elif not bars:
        rows.append({"figure": "no bar", "found": "", "bar": "", "met": ""})
    about = {"benchmark": f"[{record['name']}]({record['name']}.md)", "date": record["date"]}
    return [{**about, **row} for row in rows]


def _records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
