"""`megatrain.read_run`: tables compared with the content of each file, read by other means."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.errors import NotFoundError
from megatrain.run_files.incidents import read_incidents
from megatrain.run_files.run_directory import RunDirectory
from megatrain.run_record import read_run
from tests.helpers.require import require_module
from tests.helpers.source_tree import ROOT

require_module("pyarrow")
require_module("duckdb")

from megatrain_diagnostics.columns.schema import from_arrow  # noqa: E402
from megatrain_diagnostics.events.source import Where  # noqa: E402
from megatrain_diagnostics.events.tables import StepTotals, columns_of  # noqa: E402
from megatrain_diagnostics.store.reader import StoredEvents  # noqa: E402

SAMPLE = ROOT / "tests" / "golden" / "dashboard-sample"


def write_metrics(run: Path, *lines: object) -> Path:
    """Write lines of metrics, as objects or as invalid texts."""
    file = RunDirectory(run).metrics_file
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return run


def test_a_column_equals_the_values_of_the_lines() -> None:
    lines = map(json.loads, RunDirectory(SAMPLE).metrics_file.read_text().splitlines())
    last = {record["step"]: record for record in lines if record["kind"] == "step"}
    table = read_run(SAMPLE).metrics()

    assert table.column("step").to_pylist() == sorted(last)
    for name in set(table.schema.names):
        assert table.column(name).to_pylist() == [last[step].get(name) for step in sorted(last)], name


def test_last_report_of_a_repeated_step_counts(tmp_path: Path) -> None:
    def step(number: int, loss: float | None) -> dict[str, object]:
        return {"kind": "step", "step": number, "loss": loss}

    run = write_metrics(
        tmp_path,
        step(1, 5.0),
        {"kind": "evaluation", "step": 1, "loss": 50},
        step(2, 4.0),
        step(3, None),
        {"kind": "evaluation", "step": 3, "loss": 30.0},
        '{"kind": "step", "step": 4, "lo',
        "[]",
        step(2, 2.0),
        {"kind": "step", "step": 3, "loss": "low", "world_size": 1 << 70, "is_skipped": True},
    )

    table = read_run(run).metrics()
    assert table.select(["step", "loss"]).to_pylist() == [
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": None},
    ]
    assert table.column("is_skipped").to_pylist() == [None, None, True]
    assert table.column("world_size").to_pylist() == [None] * 3
    # The record of step 3 belongs to the steps before the rollback.
    assert read_run(run).metrics("evaluation").select(["step", "loss"]).to_pylist() == [{"step": 1, "loss": 50.0}]
    assert read_run(run).metrics("interval").num_rows == 0


def test_validation_sets_of_an_evaluation_are_a_column(tmp_path: Path) -> None:
    web = {"name": "web", "loss": 2, "num_tokens": 75, "bits_per_byte": 0.5}
    wrong = {"name": 3, "loss": "low", "num_tokens": 7.5}
    unknown = {"name": None, "loss": None, "num_tokens": None, "bits_per_byte": None}
    cases = ([web, {**web, "name": "code", "loss": None}], [wrong, "web"], [], None, {"web": web})
    lines = [{"kind": "evaluation", "step": step, "loss": 2.0, "sets": sets} for step, sets in enumerate(cases)]

    found = read_run(write_metrics(tmp_path, *lines)).metrics("evaluation").column("sets").to_pylist()
    assert found == [[web, {**web, "name": "code", "loss": None}], [unknown], [], None, None]


@pytest.mark.parametrize("kind", ["step", "interval"])
def test_sources_of_a_step_are_a_column(kind: str, tmp_path: Path) -> None:
    web, code = {"name": "web", "loss": 2.5, "num_tokens": 75}, {"name": "code", "loss": None, "num_tokens": 25}
    sources = [{**web, "num_replaced": 0}, {**code, "num_replaced": 2}]
    lines = [{"kind": kind, "step": 1, "loss": 2.0, "sources": sources}, {"kind": kind, "step": 2, "loss": 2.0}]

    assert read_run(write_metrics(tmp_path, *lines)).metrics(kind).column("sources").to_pylist() == [sources, None]


def test_an_incident_is_a_row() -> None:
    expected, _ = read_incidents(RunDirectory(SAMPLE))
    record = read_run(SAMPLE)
    rows = record.incidents().to_pylist()

    assert [row["incident_id"] for row in rows] == [one.incident_id for one in expected]
    assert [(row["kind"], row["steps_lost"]) for row in rows] == [(str(one.kind), one.steps_lost) for one in expected]
    for row, one in zip(rows, expected, strict=True):
        assert (row["culprit_hosts"], row["evidence"]) == (list(one.culprit_hosts), list(one.evidence))
        assert one.moments.loaded is not None
        assert one.moments.joined is not None
        assert row["load_s"] == one.moments.loaded - one.moments.joined
    assert record.problems == ()


def test_damaged_incidents_are_problems(tmp_path: Path) -> None:
    incidents = RunDirectory(tmp_path).incidents
    incidents.mkdir()
    (incidents / "torn.json").write_text("{")
    record = read_run(tmp_path)

    assert record.incidents().num_rows == 0
    (problem,) = record.problems
    assert "torn.json" in problem


def test_events_are_those_of_the_store() -> None:
    expected = StoredEvents(SAMPLE / "events").read(StepTotals, Where(ranks=(0, 2), last_step=40))
    table = read_run(SAMPLE).events(ranks=[0, 2], last_step=40)

    assert table.num_rows > 0
    assert "step" in table.column("operation").to_pylist(), "operations are names"
    found = from_arrow(StepTotals, table)
    for name in columns_of(StepTotals):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_without_events_a_table_has_columns_and_no_rows(tmp_path: Path) -> None:
    record = read_run(write_metrics(tmp_path))
    assert record.events("spans").num_rows == 0
    assert {"rank", "operation", "duration_ns"} <= set(record.events("spans").schema.names)
    with pytest.raises(NotFoundError, match="table 'dreams' of events; the tables are spans, totals, "):
        record.events("dreams")
    with pytest.raises(NotFoundError, match="metrics of kind 'guess'; the kinds are step, interval, evaluation"):
        record.metrics("guess")


def test_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not a run directory, which would have metrics, checkpoints or events"):
        read_run(tmp_path)
    with pytest.raises(NotFoundError, match="nowhere: No such file or directory; name a run directory"):
        read_run(tmp_path / "nowhere")
