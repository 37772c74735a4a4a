"""The timeline as a viewer reads it: nested tracks, arrows that begin and end in slices, times exact to the ns."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.contracts.black_box.operations import OF_DATA_LOADER, StepValue
from megatrain.contracts.black_box.operations import Operation as Op
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.chrome_trace import chrome_trace
from megatrain_diagnostics.analysis.step_windows import read_step_events
from megatrain_diagnostics.analysis.timeline import LANES, Timeline, lane_of, lay_out
from megatrain_diagnostics.events.tables import Values
from megatrain_job.jobs.notes import Note
from tests.helpers.drawn_spans import BASE_NS, Drawing, draw_job


def laid_out(drawing: Drawing, first: int = 0, last: int = 100, *, max_slices: int = 10_000) -> Timeline:
    source = drawing.source()
    return lay_out(read_step_events(source, 1, first, last), source.read(Values), first, last, max_slices)


def read_trace(timeline: Timeline, notes: Iterable[Note] = ()) -> dict[str, Any]:
    """Return the trace with numbers as decimals: a float would hide lost digits."""
    text = "".join(chrome_trace(timeline, notes))

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    trace: dict[str, Any] = json.loads(text, parse_float=Decimal, parse_constant=refuse)
    return trace


def ns(us: Decimal | int) -> int:
    exact = Decimal(us) * 1000
    assert exact == int(exact)
    return int(exact)


def test_notes_within_its_time_are_marks() -> None:
    timeline = laid_out(draw_job(Layout(pp_size=2), range(2), 2))
    step = int(timeline.spans.step[0])
    begin_ns = int(timeline.begin_ns[timeline.spans.step == step].min())
    within_s = (timeline.base_ns + 1_000_000) / 1e9
    notes = [
        Note("1", 0.0, "ada", "at a step", step=step),
        Note("2", 0.0, "bob", "at a time", at_unix_s=within_s),
        Note("3", 0.0, "bob", "long before", at_unix_s=within_s - 1000),
        Note("4", 0.0, "bob", "of no step here", step=10**6),
        Note("5", 0.0, "bob", "taken back", step=step, retracted_unix_s=1.0),
    ]
    found = {event["name"]: event["ts"] for event in of_kind(read_trace(timeline, notes), "i")}
    assert found == {"ada: at a step": Decimal(begin_ns) / 1000, "bob: at a time": pytest.approx(1000, abs=1)}


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def slices_by_track(trace: dict[str, Any]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    found: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for event in of_kind(trace, "X"):
        begin = ns(event["ts"])
        found.setdefault((event["pid"], event["tid"]), []).append((begin, begin + ns(event["dur"]), event["name"]))
    return found


def check_nesting(slices: list[tuple[int, int, str]]) -> None:
    """Read one track as viewers do: a slice that begins inside of another must end inside of it."""
    stack: list[int] = []
    for begin, end, name in sorted(slices, key=lambda one: (one[0], -one[1])):
        assert end > begin >= 0, name
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1], f"{name} at {begin} leaves its track's slice"
        stack.append(end)


def names(trace: dict[str, Any], kind: str) -> dict[Any, str]:
    key = "pid" if kind == "process_name" else "tid"
    return {event[key]: event["args"]["name"] for event in of_kind(trace, "M") if event["name"] == kind}


@pytest.fixture(scope="module")
def job() -> Timeline:
    return laid_out(draw_job(Layout(tp_size=2, pp_size=4, dp_size=2), range(10, 12), 4), 10, 11)


@pytest.fixture(scope="module")
def trace(job: Timeline) -> dict[str, Any]:
    return read_trace(job)


def test_tracks_nest_and_communication_has_its_own(job: Timeline, trace: dict[str, Any]) -> None:
    tracks = names(trace, "thread_name")

    for (_, tid), slices in slices_by_track(trace).items():
        check_nesting(slices)
        if tracks[tid].split()[0] not in ("compute", "host"):
            ordered = sorted(slices)
            assert all(before[1] <= after[0] for before, after in pairwise(ordered))
    assert {name.split()[0] for name in tracks.values()} == {"compute", "tp", "pp-send", "pp-recv", "dp", "host"}
    assert len(of_kind(trace, "X")) == len(job.spans.rank)


def test_every_operation_has_a_lane_and_the_hosts_is_for_its_own() -> None:
    lanes = {operation: lane_of(operation) for operation in Op}
    assert set(lanes.values()) == set(LANES)
    on_host = {one for one in Op if not one.is_on_device}
    assert {one for one in Op if lanes[one] in ("host", "data-loader", "pictures")} == on_host
    assert {one for one in Op if lanes[one] in ("data-loader", "pictures")} == set(OF_DATA_LOADER)


def test_arrows_join_each_send_with_its_receive(trace: dict[str, Any]) -> None:
    slices = slices_by_track(trace)
    starts = {event["id"]: event for event in of_kind(trace, "s")}
    finishes = {event["id"]: event for event in of_kind(trace, "f")}

    def enclosing(event: dict[str, Any]) -> tuple[int, int, str]:
        at = ns(event["ts"])
        (found,) = [one for one in slices[event["pid"], event["tid"]] if one[0] <= at < one[1]]
        return found

    # 3 links in each of the 4 pipelines, 4 micro-batches, 2 steps
    assert set(starts) == set(finishes)
    assert len(starts) == 3 * 4 * 4 * 2
    for number, start in starts.items():
        finish = finishes[number]
        assert finish["bp"] == "e"
        assert (start["cat"], start["name"]) == (finish["cat"], finish["name"])
        sent, received = enclosing(start), enclosing(finish)
        assert (sent[2], received[2]) == ("forward-send", "forward-recv")
        assert finish["pid"] == start["pid"] + 4  # the next stage: tp 2 x dp 2 further
        assert received[1] >= sent[0]


def test_track_ids_are_unique_and_names_sort_by_rank(trace: dict[str, Any]) -> None:
    owners: dict[int, int] = {}
    for event in of_kind(trace, "X"):
        assert isinstance(event["tid"], int)
        assert event["tid"] > 0
        assert owners.setdefault(event["tid"], event["pid"]) == event["pid"]
    process_names = names(trace, "process_name")

    assert process_names[9] == "rank 09 pp=2 dp=0 tp=1 host-1"
    assert [process_names[rank] for rank in range(16)] == sorted(process_names.values())
    indices = {e["pid"]: e["args"]["sort_index"] for e in of_kind(trace, "M") if e["name"] == "process_sort_index"}
    assert indices == {rank: rank for rank in range(16)}


def test_times_are_exact_relative_to_the_base(job: Timeline, trace: dict[str, Any]) -> None:
    base = int(trace["otherData"]["base_unix_ns"])

    begins = sorted(base + ns(event["ts"]) for event in of_kind(trace, "X"))
    assert begins == sorted(job.spans.start_ns.tolist())
    assert base > 2**53  # so it cannot be part of times that are floats
    assert sorted(ns(event["dur"]) for event in of_kind(trace, "X")) == sorted(job.spans.duration_ns.tolist())


def test_nanoseconds_are_kept() -> None:
    drawing = Drawing()
    drawing.span(Op.FORWARD_COMPUTE, 0.001, 1_234_567.891)
    drawing.span(Op.BACKWARD_COMPUTE, 1_234_567.892, 0.0)

    first, second = of_kind(read_trace(laid_out(drawing)), "X")

    assert (str(first["ts"]), str(first["dur"])) == ("0.000", "1234567.891")
    assert (str(second["ts"]), str(second["dur"])) == ("1234567.891", "0.001")  # a slice of 0 ns would be invisible


def test_fields_of_a_slice() -> None:
    drawing = Drawing(layout=Layout(dp_size=2))
    dp = drawing.group("dp", (0, 1))
    more = {"microbatch": 2, "chunk": 1, "group": dp, "collective": 9, "num_bytes": 64}
    drawing.span(Op.GRADS_REDUCE_SCATTER, 5, 7, flags=2 | 1, launch_ns=BASE_NS + 2_500, **more)

    (event,) = of_kind(read_trace(laid_out(drawing)), "X")

    assert event["args"] == {"step": 1, "microbatch": 2, "chunk": 1, "group": "dp", "collective": 9, "bytes": 64,
                             "issue_us": Decimal("2.500"), "has_failed": True}  # fmt: skip


def test_open_span_is_drawn_to_the_end_and_marked() -> None:
    drawing = Drawing()
    drawing.span(Op.FORWARD_COMPUTE, 0, 100)
    drawing.span(Op.BARRIER, 10, None)

    trace = read_trace(laid_out(drawing))
    (event,) = [one for one in of_kind(trace, "X") if one["name"] == "barrier"]

    assert event["args"]["is_open"]
    assert ns(event["dur"]) == 90_000
    assert "1 slice without an end" in trace["otherData"]["notes"][0]


def test_values_are_counters_if_they_are_finite() -> None:
    drawing = Drawing()
    drawing.span(Op.STEP, 0, 100)
    drawing.value(StepValue.LOSS, 90, 2.5)
    drawing.value(StepValue.LOSS, 95, float("nan"))
    drawing.value(StepValue.GRAD_NORM, 95, float("inf"))

    trace = read_trace(laid_out(drawing))

    (counter,) = of_kind(trace, "C")
    assert (counter["name"], counter["args"], str(counter["ts"])) == ("loss", {"loss": Decimal("2.5")}, "90.000")
    assert trace["otherData"]["notes"] == ["left out 2 values: not finite, or of ranks that are not drawn"]


@pytest.mark.parametrize(
    ("limit", "num_kept", "note"),
    [
        (16 * 20, 160 + 160, None),
        (200, 160, "steps 11 to 11 with 160 slices"),
        (100, 100, "everything except 10 ranks of step 10"),
    ],
)
def test_slices_beyond_the_limit_are_left_out(limit: int, num_kept: int, note: str | None) -> None:
    drawing = draw_job(Layout(pp_size=2, dp_size=8), range(10, 12), 2)
    timeline = laid_out(drawing, max_slices=limit)

    total = len(drawing.rows[type(timeline.spans)])
    assert total == 16 * 20
    if note is None:
        assert not timeline.left_out
    else:
        (text,) = timeline.left_out
        assert text.startswith(note)
    assert len(timeline.spans.rank) == len(of_kind(read_trace(timeline), "X")) == num_kept


def test_limit_that_allows_nothing_still_gives_a_note() -> None:
    timeline = laid_out(draw_job(Layout(), range(1), 2), max_slices=1)

    assert timeline.num_slices == 0
    assert "everything except 0 ranks" in timeline.left_out[0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([Op.FORWARD_COMPUTE, Op.GRADS_REDUCE_SCATTER, Op.STEP, Op.GC]),
            st.integers(0, 30),
            st.integers(-1, 10),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=25,
    )
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_any_spans_make_tracks_that_nest(drawn: list[tuple[Op, int, int, int]]) -> None:
    drawing = Drawing(layout=Layout(dp_size=2))
    for operation, start, length, rank in drawn:
        drawing.span(operation, start, length if length >= 0 else None, rank=rank)

    slices = slices_by_track(read_trace(laid_out(drawing)))

    for track in slices.values():
        check_nesting(track)
    assert sum(map(len, slices.values())) == len(drawn)


@pytest.mark.slow
def test_timeline_of_256_ranks_is_written(tmp_path: Path) -> None:
    timeline = laid_out(draw_job(Layout(tp_size=8, pp_size=4, dp_size=8), range(2), 6), max_slices=2_000_000)
    path = tmp_path / "timeline.json.gz"

    with gzip.open(path, "wt") as file:
        file.writelines(chrome_trace(timeline))

    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == len(timeline.spans.rank) > 10_000
    assert np.all(timeline.length_ns > 0)
