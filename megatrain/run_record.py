"""`megatrain.read_run`: the metrics, incidents and events of a run as Arrow tables, from its directory alone.

Loads no torch. The run may be active or over, and may be from another machine. Only `events` needs the package
megatrain_diagnostics.
"""

from __future__ import annotations

import json
import math
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.contracts.errors import DataError, NotFoundError
from megatrain.contracts.files.bounded_files import open_below
from megatrain.contracts.records.incident import PHASES, Incident, phase_seconds
from megatrain.reporting.report import EvaluationReport, IntervalReport, SourceReport, StepReport, ValidationSetReport
from megatrain.run_files.incidents import read_incidents
from megatrain.run_files.run_directory import RunDirectory

if TYPE_CHECKING:
    import pyarrow as pa

EVENT_TABLES_MODULE = "megatrain_diagnostics.store.reader"
"""A name, imported when it is used: the trainer's package does not depend on the diagnosis."""

_REPORTS = {report.kind: report for report in (StepReport, IntervalReport, EvaluationReport)}
_ARROW_TYPES: Mapping[object, str] = {
    int: "int64", float: "float64", bool: "bool", str: "string", ValidationSetReport: "sets", SourceReport: "sources",
}  # fmt: skip
_PARTS: Mapping[str, type[ValidationSetReport | SourceReport]] = {"sets": ValidationSetReport, "sources": SourceReport}
"""The reports in columns that are lists, by column type."""
_IncidentColumn = tuple[str, str, Callable[[Incident], Any]]
_INCIDENT_COLUMNS: Sequence[_IncidentColumn] = (
    ("incident_id", "string", lambda incident: incident.incident_id),
    ("kind", "string", lambda incident: str(incident.kind)),
    ("state", "string", lambda incident: str(incident.state)),
    ("round", "int64", lambda incident: incident.round),
    ("began_unix_s", "float64", lambda incident: incident.moments.began),
    ("detected_unix_s", "float64", lambda incident: incident.moments.detected),
    ("action", "string", lambda incident: incident.action),
    ("reason", "string", lambda incident: incident.reason),
    ("label", "string", lambda incident: incident.label),
    ("confidence", "string", lambda incident: incident.confidence),
    ("culprit_hosts", "strings", lambda incident: list(incident.culprit_hosts)),
    ("culprit_ranks", "numbers", lambda incident: list(incident.culprit_ranks)),
    ("evidence", "strings", lambda incident: list(incident.evidence)),
    ("last_step", "int64", lambda incident: incident.last_step),
    ("resumed_step", "int64", lambda incident: incident.resumed_step),
    ("steps_lost", "int64", lambda incident: incident.steps_lost),
    ("next_round", "int64", lambda incident: incident.next_round),
    ("effective_time_ratio", "float64", lambda incident: incident.effective_time_ratio),
    ("verdict", "string", lambda incident: incident.verdict),
)


class RunRecord:
    """The records of one run. Each call reads the files again."""

    def __init__(self, run: RunDirectory) -> None:
        self.root = run.root
        self._run = run
        self._problems: dict[str, None] = {}

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence for each incident or part of the events that an earlier call could not read and left out."""
        return tuple(self._problems)

    def metrics(self, kind: str = "step") -> pa.Table:
        """Return the reports of a kind: "step", "interval" or "evaluation", one row for each, ordered by step.

        The columns are the fields of metrics.jsonl (docs/guides/metrics.md) without version and kind. Null: not known,
        or not finite. For repeated steps only the last report is returned. Without reports the table has no rows.
        Raises: NotFoundError for an unknown kind; DataError when the file cannot be read, or pyarrow is absent.
        """
        if kind not in _REPORTS:
            raise NotFoundError(f"metrics of kind {kind!r}; the kinds are {', '.join(_REPORTS)}")
        columns = {"step": "int64", "unix_time_s": "float64", **_columns_of(_REPORTS[kind])}
        records = [record for record in _valid_reports(_records(self._run)) if record["kind"] == kind]
        return _table({
            name: (dtype, [_value(record.get(name), dtype) for record in records]) for name, dtype in columns.items()
        })  # fmt: skip

    def incidents(self) -> pa.Table:
        """Return a row for each incident, oldest first. A column PHASE_s has the seconds of a phase of the recovery.

        Null: unknown, or not yet known. Raises: DataError when pyarrow is absent.
        """
        found, problems = read_incidents(self._run)
        self._problems.update(dict.fromkeys(problems))
        columns = {name: (dtype, [read(incident) for incident in found]) for name, dtype, read in _INCIDENT_COLUMNS}
        phases = [phase_seconds(incident.moments) for incident in found]
        columns |= {f"{phase}_s": ("float64", [seconds[phase] for seconds in phases]) for phase in PHASES}
        return _table(columns)

    def events(
        self,
        table: str = "totals",
        *,
        rounds: Iterable[int] | None = None,
        ranks: Iterable[int] | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> pa.Table:
        """Return rows of a table of events (see docs/reference/events.md), sorted by round, rank and sequence.

        "totals" has the time of each rank, step and operation. The limits are inclusive; None: no limit. Only
        jobs under `megatrain launch` have events; for other runs the table has no rows.
        Raises: NotFoundError for an unknown table; DataError when nothing can be read, the answer is too large, or
        megatrain[diagnostics] is not installed.
        """
        try:
            read = import_module(EVENT_TABLES_MODULE).read_arrow_table
        except ImportError as error:
            raise DataError(f"events need {error.name}; pip install 'megatrain[diagnostics]'") from error
        found, problems = read(
            self._run.events,
            table,
            rounds=None if rounds is None else tuple(rounds),
            ranks=None if ranks is None else tuple(ranks),
            first_step=first_step,
            last_step=last_step,
        )
        self._problems.update(dict.fromkeys(problems))
        return found


def read_run(path: str | os.PathLike[str]) -> RunRecord:
    """Return the records of the run in a directory.

    Raises: NotFoundError when the directory does not exist, or is not a run directory.
    """
    run = RunDirectory(Path(path))
    try:
        names = os.listdir(run.root)
    except OSError as error:
        raise NotFoundError(f"{run.root}: {error.strerror}; name a run directory, such as runs/demo") from error
    if not any(run.owns(name) for name in names):
        raise NotFoundError(
            f"{run.root}: not a run directory, which would have metrics, checkpoints or events; name one, such as "
            "runs/demo"
        )
    return RunRecord(run)


def _columns_of(
    report: type[StepReport | IntervalReport | EvaluationReport | ValidationSetReport | SourceReport],
) -> dict[str, str]:
    hints = typing.get_type_hints(report)
    return {field.name: _ARROW_TYPES[_kind_of(hints[field.name])] for field in fields(report)}


def _kind_of(hint: Any) -> object:
    """Return the type in a hint: T of `T`, `T | None` and `tuple[T, ...]`."""
    return next((arg for arg in typing.get_args(hint) if arg is not type(None)), hint)


def _records(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the reports in the order in which they were written, without unreadable lines (as after a crash)."""
    try:
        descriptor = open_below(run.root, str(run.metrics_file.relative_to(run.root)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{run.metrics_file}: cannot be read: {error.strerror}") from error
    found = []
    with open(descriptor, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int) and record.get("kind") in _REPORTS:
                found.append(record)
    return found


def _valid_reports(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the valid reports: without those that a resume from an earlier step made obsolete."""
    found = []
    earliest = math.inf
    for record in reversed(records):
        if record["step"] < earliest:
            found.append(record)
        if record["kind"] == StepReport.kind:
            earliest = min(earliest, record["step"])
    return found[::-1]


def _value(value: object, dtype: str) -> object:
    """Return a JSON value converted to the column's type; None if it has another type."""
    if dtype == "float64" and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return None
    if dtype == "int64" and isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 1 << 63 else None
    if dtype in _PARTS and isinstance(value, list):
        columns = _columns_of(_PARTS[dtype])
        return [
            {name: _value(row.get(name), columns[name]) for name in columns} for row in value if isinstance(row, dict)
        ]
    return value if (dtype, type(value)) in (("bool", bool), ("string", str)) else None


def _table(columns: Mapping[str, tuple[str, list[Any]]]) -> pa.Table:
    """Return an Arrow table. `columns`: type and values, by name."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise DataError("tables need pyarrow; pip install 'megatrain[diagnostics]'") from error
    types = {
        "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_(), "string": pa.string(),
        "strings": pa.list_(pa.string()), "numbers": pa.list_(pa.int64()),
    }  # fmt: skip
    for kind, part in _PARTS.items():
        types[kind] = pa.list_(pa.struct([(name, types[dtype]) for name, dtype in _columns_of(part).items()]))
    schema = pa.schema([pa.field(name, types[dtype]) for name, (dtype, _) in columns.items()])
    return pa.Table.from_arrays([pa.array(values, types[dtype]) for dtype, values in columns.values()], schema=schema)
