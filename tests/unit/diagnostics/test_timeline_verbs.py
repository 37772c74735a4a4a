"""`megatrain diag` comm, drift, explain and timeline on a directory of segments."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.contracts.black_box.operations import Operation as Op
from megatrain.contracts.black_box.operations import StepValue
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.drawn_spans import Drawing, draw_job

LAYOUT = Layout(tp_size=2, pp_size=2, dp_size=2)


def stored(directory: Path, drawing: Drawing) -> Path:
    with SegmentStore(directory) as store:
        for kind, table in drawing.tables().items():
            store.append(kind, to_arrow(table))
        store.commit()
    return directory


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with steps 10 to 13 in full and, as sums only, those to 29."""
    drawing = draw_job(LAYOUT, range(10, 14), 3)
    for step in range(14, 30):
        for rank in range(LAYOUT.world_size):
            drawing.total(Op.STEP, 100_000 * step, 90_000, rank=rank, step=step)
            drawing.total(Op.FORWARD_COMPUTE, 100_000 * step, 60_000, rank=rank, step=step)
    return stored(tmp_path_factory.mktemp("events"), drawing)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["diag", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["diag", *arguments]) == 0
    return capsys.readouterr().out


def test_explain_a_full_step(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "explain", str(events), "--step", "11")

    assert document["schema_version"] == 1
    assert (document["step"], document["is_full"], document["num_missing_ranks"]) == (11, True, 0)
    assert len(document["stages"]) == 2
    assert len(document["ranks"]) == 8
    for kind in (document["job"], *document["stages"], *document["ranks"]):
        assert sum(kind["spent_ns"].values()) == kind["wall_ns"]
        assert sum(kind["percent"].values()) == pytest.approx(100.0, abs=1e-9)
    assert document["job"]["spent_ns"]["compute"] > 0
    kinds = {one["operation"]: one for one in document["communication"]}
    assert kinds.keys() == {"tp-all-gather", "forward-send", "forward-recv", "grads-reduce-scatter"}
    for kind in kinds.values():
        assert kind["num_windows"] == 8
        assert kind["total_ns"] == kind["exposed_ns"] + kind["hidden_ns"] + kind["elsewhere_ns"] > 0
    assert [stage["name"] for stage in document["communication_by_stage"]] == ["stage 0", "stage 1"]
    text = shown(capsys, "explain", str(events), "--step", "11")
    assert "100.00 %" in text
    assert "communication of a rank" in text
    assert "arrived last at collectives" in text


def test_explain_lists_stages_with_different_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = Drawing(layout=Layout(pp_size=2))
    for rank, compute in enumerate((60, 90)):
        drawing.span(Op.STEP, 0, 100, rank=rank)
        drawing.total(Op.STEP, 0, 100, rank=rank)
        drawing.total(Op.STEP, 100, 1, rank=rank, step=2)
        drawing.span(Op.BACKWARD_COMPUTE, 0, compute, rank=rank)
        drawing.span(Op.GRADS_REDUCE_SCATTER, 50, 20, rank=rank)
        drawing.span(Op.PARAMS_ALL_GATHER, 20, 20, rank=rank)

    lines = shown(capsys, "explain", str(stored(tmp_path, drawing)), "--step", "1").splitlines()

    (place,) = [number for number, line in enumerate(lines) if line.startswith("share overlapped")]
    # gathers are overlapped on both; no rank waited for the end of the second stage's reduction
    assert [line.split() for line in lines[place : place + 3]] == [
        ["share", "overlapped", "grads-reduce-scatter"],
        ["stage", "0", "50.0", "%"],
        ["stage", "1", "<=", "100.0", "%"],
    ]  # fmt: skip


def test_explain_a_step_of_sums(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "explain", str(events), "--step", "20")

    assert not document["is_full"]
    assert document["job"]["percent"]["not-split"] == pytest.approx(40.0)
    assert document["communication"] == []
    text = shown(capsys, "explain", str(events), "--step", "20")
    assert "sums only" in text
    assert "note: there are all spans of steps 10, 11, 12, 13" in text


def test_explain_lists_the_recorded_steps(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diag", "explain", str(events), "--step", "500"]) != 0

    error = capsys.readouterr().err
    assert "all spans of steps 10, 11, 12, 13; sums of steps ..., 18" in error


def test_timeline_is_written(events: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json.gz"
    arguments = ("timeline", str(events), "--ranks", "0:3", "--steps", "10:11", "--output", str(path))

    document = printed(capsys, *arguments)

    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == document["num_slices"] > 0
    assert {event["pid"] for event in slices} == {0, 1, 2, 3}
    assert {event["args"]["step"] for event in slices} == {10, 11}
    assert trace["otherData"]["base_unix_ns"] == str(document["base_unix_ns"])
    first = path.read_bytes()
    assert "perfetto" in shown(capsys, *arguments)
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_timeline_defaults_to_the_newest_two_steps(
    events: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.json"

    assert main(["diag", "timeline", str(events), "--output", str(path), "--max-slices", "200"]) == 0

    assert "left out: steps 13 to 13" in capsys.readouterr().err
    assert {e["args"]["step"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"} == {12}


def test_timeline_of_a_run_that_is_given_by_name_has_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path / "runs" / "my" / "events", draw_job(LAYOUT, range(10, 12), 3))
    monkeypatch.chdir(tmp_path)
    assert main(["annotate", "my", "--text", "switch 4 was replaced", "--step", "10"]) == 0

    assert main(["diag", "timeline", "my", "--output", "plain.json"]) == 0

    assert "switch 4 was replaced" in Path("plain.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--steps", "20:21"), "no span of steps 20 to 21"),
        (("--steps", "20:"), "no step was recorded span by span"),
        (("--output", "/nowhere/at/all.json"), "name a file that can be written"),
    ],
)
def test_timeline_without_spans_or_output_file_is_refused(
    events: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    assert main(["diag", "timeline", str(events), "--output", str(tmp_path / "t.json"), *arguments]) != 0

    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_steps_that_one_rank_alone_reports_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = draw_job(LAYOUT, range(14, 20), 2)
    for step in (-1, 2**31 - 1):
        drawing.total(Op.STEP, 500, 90_000, rank=3, step=step)
        drawing.span(Op.STEP, 500, 90_000, rank=3, step=step)
    place = str(stored(tmp_path / "events", drawing))

    timeline = printed(capsys, "timeline", place, "--output", str(tmp_path / "out.json"))
    assert (timeline["first_step"], timeline["last_step"]) == (18, 19)
    assert printed(capsys, "comm", place)["steps"][-1] == 19
    drift = printed(capsys, "drift", place)
    assert (drift["first_step"], drift["last_step"]) == (17, 19)


def test_comm_prints_bandwidths(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "comm", str(events))

    assert document["steps"] == [10, 11, 12, 13]
    assert {one["operation"] for one in document["bandwidths"]} == {
        "forward-send", "grads-reduce-scatter", "tp-all-gather",
    }  # fmt: skip
    assert document["num_incomplete"] == 0
    text = shown(capsys, "comm", str(events), "--steps", "11:12")
    assert "GB/s" in text
    assert main(["diag", "comm", str(events), "--steps", "20:25"]) != 0
    assert "no such step was recorded span by span" in capsys.readouterr().err


def test_drift_prints_no_change_of_a_steady_job(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "drift", str(events), "--peak-tflops", "100")

    assert (document["first_step"], document["last_step"], document["num_steps"]) == (13, 29, 17)
    assert (document["changes"], document["mfu"]) == ([], None)
    assert document["stagger"]["num_exchanges"] == 4 * 4
    text = shown(capsys, "drift", str(events))
    assert "no lasting change" in text
    assert "not known: the steps cover less than 20 hours, or are too few" in text


def test_a_change_is_reported_with_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = Drawing()
    for step in range(80):
        forward = 60_000 if step < 40 else 90_000
        drawing.total(Op.STEP, 200_000 * step, forward + 10_000, step=step)
        drawing.total(Op.FORWARD_COMPUTE, 200_000 * step, forward, step=step)
        drawing.value(StepValue.MODEL_FLOPS, 200_000 * step, 1e12, step=step)
        # a peak that is not finite or impossibly high does not count
        peak = {10: float("nan"), 20: float("inf"), 30: 9e99}.get(step, 5e13)
        drawing.value(StepValue.PEAK_FLOPS, 200_000 * step, peak, step=step)
    place = stored(tmp_path / "events", drawing)

    text = shown(capsys, "drift", str(place))

    assert "step time changed at step 40" in text
    assert "70.000 ms to 100.000 ms, +42.9%" in text
    assert "because of forward-compute: 60.000 ms to 90.000 ms a step, 100% of the change; rank 0" in text
    # of the 77 steps after the warm-up 40 do 1 TFLOP in 100 ms, by a peak of 50 TFLOP/s
    assert printed(capsys, "drift", str(place))["mfu"] == pytest.approx(0.2)
    assert printed(capsys, "drift", str(place), "--peak-tflops", "100")["mfu"] == pytest.approx(0.1)


def test_truncated_segment_is_reported_and_nothing_else_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = stored(tmp_path / "events", draw_job(LAYOUT, range(10, 12), 2))
    whole = sorted((place / "spans").rglob("*.parquet"))[0]
    (whole.parent / f"{whole.stem}9.parquet").write_bytes(whole.read_bytes()[:100])

    assert main(["diag", "explain", str(place), "--step", "10"]) == 0

    found = capsys.readouterr()
    assert "100.00 %" in found.out
    assert "9.parquet" in found.err
