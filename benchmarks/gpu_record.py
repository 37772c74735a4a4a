"""The results of the GPU benchmark so far, written to disk after every figure: gpu.json, and gpu.md for people.

Several processes write it, one after the other. Each reads it when it begins.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from benchmarks.machine import machine
from benchmarks.tables import table

Row = dict[str, Any]


class GpuRecord:
    """The document of one run in `directory`."""

    def __init__(self, directory: Path, document: dict[str, Any]) -> None:
        self.directory = directory
        self.document = document

    @classmethod
    def begin(cls, directory: Path, command: str) -> Self:
        """Write an empty record that replaces an earlier one, and return it."""
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        record = cls(directory, {"name": "gpu", "date": date, "command": command, "machine": machine(), "stages": {}})
        directory.mkdir(parents=True, exist_ok=True)
        record.write()
        return record

    @classmethod
    def resume(cls, directory: Path, command: str, stages: Collection[str]) -> Self:
        """Return the record in `directory` without the results of these stages, which are measured again.

        Without a record there, or with one of another machine, an empty one.
        """
        if not (directory / "gpu.json").exists():
            return cls.begin(directory, command)
        record = cls.read(directory)
        if record.document["machine"] != machine():
            return cls.begin(directory, command)
        kept = {name: stage for name, stage in record.document["stages"].items() if name not in stages}
        record.document |= {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "stages": kept}
        record.write()
        return record

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Return the record in `directory`."""
        return cls(directory, json.loads((directory / "gpu.json").read_text()))

    def write(self) -> None:
        """Write the record to disk. A reader finds the previous state or this one, never a partial one."""
        for name, text in (
            ("gpu.json", json.dumps(self.document, indent=2) + "\n"),
            ("gpu.md", markdown(self.document)),
        ):
            unfinished = self.directory / f".{name}.unfinished"
            unfinished.write_text(text)
            unfinished.replace(self.directory / name)

    def stage(self, name: str) -> GpuStage:
        """Return the part of one stage, which is empty until the stage has a result."""
        empty = {"seconds": 0.0, "found": [], "failed": [], "note": "", "is_done": False}
        return GpuStage(self, self.document["stages"].setdefault(name, empty))


class GpuStage:
    """One stage of a record. `content` has its time, its rows or facts, and its failures. All changes go to disk."""

    def __init__(self, record: GpuRecord, content: dict[str, Any]) -> None:
        self.record = record
        self.content = content

    def change(self, **values: Any) -> None:
        """Set some of found, seconds, note and is_done."""
        self.content |= values
        self.record.write()

    def fail(self, *reasons: str) -> None:
        """Add failures. A run with failures counts as failed."""
        self.content["failed"] += reasons
        self.record.write()

    def row(self, **identity: Any) -> Row:
        """Return the row with `identity`: one that an earlier process began, or a new one."""
        rows: list[Row] = self.content["found"]
        for row in rows:
            if all(key in row and row[key] == value for key, value in identity.items()):
                return row
        rows.append(dict(identity))
        self.record.write()
        return rows[-1]


def markdown(document: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    lines = [
        "# One GPU: kernels and whole steps",
        "",
        f"{document['date']}, {facts}.",
        f"Command: `{document['command']}`.",
    ]
    for name, stage in document["stages"].items():
        lines += ["", f"## {name} ({stage['seconds']} s)", ""]
        lines += [stage["note"], ""] if stage["note"] else []
        for reason in stage["failed"]:
            lines += ["Failed:", "", *(f"    {line}" for line in reason.splitlines()), ""]
        found = stage["found"]
        if isinstance(found, dict):
            lines += [f"- {key}: {value}" for key, value in found.items()]
        elif found:
            columns = dict.fromkeys(key for row in found for key in row)
            lines.append(table([{key: row.get(key, "") for key in columns} for row in found]))
    return "\n".join(lines) + "\n"


def beside(rows: list[Row], column: str, base: str, same: str = "layers") -> None:
    """Add to each row the ratio of its `column` to that of the side `base`, where both are figures.

    same: the column in which the two rows agree. If several rows of `base` do, the last one that has a figure counts.
    """
    bases = {row.get(same): row[column] for row in rows if row["side"] == base and isinstance(row.get(column), float)}
    for row in rows:
        row[f"{column} / {base}"] = ratio(row.get(column), bases.get(row.get(same)))


def ratio(value: object, base: object) -> float | str:
    """Return value / base, or "" where one of them is not a figure."""
    return value / base if isinstance(value, float) and isinstance(base, float) else ""
