"""The timeline: slices as `megatrain diag timeline` writes them, ideals as in what-if, critical paths computed by
hand."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from megatrain.cli import main
from megatrain.contracts.black_box.operations import Operation as Op
from megatrain.contracts.black_box.operations import operation_name
from megatrain.contracts.layout import Layout
from megatrain_dashboard.api.timeline import reader as timelines
from megatrain_dashboard.api.timeline.route import gzipped, router
from megatrain_dashboard.api.timeline.view import default_ranks
from megatrain_dashboard.responses.binary import unpack
from megatrain_diagnostics.analysis.ideal_timeline import critical_path, ideal_times
from megatrain_diagnostics.analysis.timeline import LANES
from megatrain_diagnostics.analysis.whatif import make_model, what_if
from megatrain_diagnostics.analysis.whatif.from_spans import operations_of
from megatrain_diagnostics.events.roster import make_roster
from megatrain_diagnostics.events.tables import Spans, select
from megatrain_diagnostics.replay import build_replica_graph, evaluate_replicas
from tests.helpers.dashboard_pictures import PictureSource, picture_client, stored_events
from tests.helpers.drawn_spans import Drawing, draw_job
from tests.helpers.pipeline_job import PipelineJob
from tests.helpers.recorded_spans import ROUND, recorded_spans, who_ran
from tests.helpers.synthetic_steps import empty_groups

LAYOUT = Layout(tp_size=2, pp_size=2, dp_size=2)
STEPS = range(10, 13)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_events(tmp_path_factory.mktemp("run"), *draw_job(LAYOUT, STEPS, 3).tables().values())


@pytest.fixture(scope="module")
def client(run: Path) -> TestClient:
    return picture_client(PictureSource(run), router)


def drawn(client: TestClient, query: str = "", path: str = "/timeline") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    response = client.get(f"{path}?{query}")
    assert response.status_code == 200, response.text
    return unpack(response.content)


def trace_of(run: Path, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Return the trace that the command writes of the same events."""
    path = tmp_path / "trace.json"
    assert main(["diag", "timeline", str(run), "--output", str(path), *arguments]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_slices_equal_those_of_the_command(run: Path, client: TestClient, tmp_path: Path) -> None:
    trace = trace_of(run, tmp_path, "--steps", "10:11", "--ranks", "0:3,6")
    fields, arrays = drawn(client, "first=10&last=11&ranks=0-3,6")

    line_of = np.repeat(np.arange(len(arrays["line_track"])), np.diff(arrays["line_first"]))
    track = arrays["line_track"][line_of]
    names = [operation_name(int(number)) for number in arrays["operation"]]
    lanes = [
        LANES[lane] if not overflow else f"{LANES[lane]} ({overflow + 1})"
        for lane, overflow in zip(arrays["track_lane"], arrays["track_overflow"], strict=True)
    ]
    threads = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    reported = sorted(
        (e["pid"], threads[e["tid"]], e["name"], round(e["ts"] * 1000), round(e["dur"] * 1000), e["args"]["step"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    )
    found = sorted(
        (int(arrays["track_rank"][one]), lanes[one], name, round(begin), round(length), int(step))
        for one, name, begin, length, step in zip(
            track, names, arrays["begin"], arrays["length"], arrays["step"], strict=True
        )
    )
    assert found == reported
    assert fields["base_unix_ns"] == trace["otherData"]["base_unix_ns"]
    assert len(arrays["flows"]) == trace["otherData"]["num_flows"] > 0
    assert arrays["rank"].tolist() == [0, 1, 2, 3, 6]
    assert [fields["hosts"][host] for host in arrays["rank_host"]] == ["host-0"] * 5


def test_slices_of_a_line_come_by_time_and_never_overlap(client: TestClient) -> None:
    _, arrays = drawn(client, "first=10&last=12")

    for first, last in zip(arrays["line_first"], arrays["line_first"][1:], strict=False):
        begin, end = arrays["begin"][first:last], (arrays["begin"] + arrays["length"])[first:last]
        assert last > first
        assert (begin[1:] >= end[:-1]).all()
    assert arrays["line_first"][-1] == len(arrays["begin"])


def test_nested_slice_is_drawn_below_its_parent(tmp_path: Path) -> None:
    drawing = Drawing(Layout())
    drawing.span(Op.STEP, 0, 100)
    drawing.span(Op.DATA_WAIT, 10, 20)
    drawing.span(Op.GC, 12, 5)
    drawing.span(Op.GC, 60, 5)
    drawing.span(Op.FORWARD_COMPUTE, 40, None, microbatch=2, chunk=1)
    client = picture_client(PictureSource(stored_events(tmp_path, *drawing.tables().values())), router)

    _, arrays = drawn(client, "first=1&last=1")

    lines = [
        (
            LANES[arrays["track_lane"][track]],
            int(depth),
            [operation_name(int(number)) for number in arrays["operation"][first:last]],
        )
        for track, depth, first, last in zip(
            arrays["line_track"], arrays["line_depth"], arrays["line_first"], arrays["line_first"][1:], strict=False
        )
    ]
    assert lines == [
        ("compute", 0, ["forward-compute"]),
        ("host", 0, ["step"]),
        ("host", 1, ["data-wait", "gc"]),
        ("host", 2, ["gc"]),
    ]
    assert arrays["flags"].tolist() == [1, 0, 0, 0, 0]
    assert (arrays["microbatch"][0], arrays["chunk"][0], arrays["chunk"][1]) == (2, 1, 255)


def test_arrow_leads_from_a_send_to_its_receive(client: TestClient) -> None:
    _, arrays = drawn(client, "first=10&last=10")

    rank_of_slice = arrays["track_rank"][
        np.repeat(arrays["line_track"], np.diff(arrays["line_first"]))
    ]  # fmt: skip
    assert len(arrays["flows"]) == 3 * 4
    for send, receive in arrays["flows"].tolist():
        assert operation_name(int(arrays["operation"][send])) == "forward-send"
        assert operation_name(int(arrays["operation"][receive])) == "forward-recv"
        assert arrays["microbatch"][send] == arrays["microbatch"][receive]
        assert rank_of_slice[receive] == rank_of_slice[send] + 4


def test_newest_full_step_is_drawn_where_none_is_named(client: TestClient) -> None:
    steps = client.get("/timeline/steps").json()
    fields, arrays = drawn(client)

    assert [step["step"] for step in steps["steps"]] == list(STEPS)
    assert all(step["num_ranks"] == 8 and step["duration_s"] > 0 for step in steps["steps"])
    assert (fields["first_step"], fields["last_step"]) == (12, 12)
    assert set(arrays["step"].tolist()) == {12}
    assert arrays["steps"].tolist() == [12]
    assert arrays["step_begin"][0] == arrays["begin"].min()


def test_limit_is_kept_and_reported(client: TestClient) -> None:
    fields, arrays = drawn(client, "first=10&last=12&max_slices=200")

    assert len(arrays["begin"]) <= 200
    assert "are drawn" in fields["left_out"][0]


def test_trace_equals_that_of_the_command(run: Path, client: TestClient, tmp_path: Path) -> None:
    response = client.get("/timeline/trace.json.gz?first=11&last=12&ranks=2:5")

    assert response.headers["content-type"] == "application/gzip"
    found = json.loads(gzip.decompress(response.content))
    assert found == trace_of(run, tmp_path, "--steps", "11:12", "--ranks", "2:5")


def test_pieces_of_text_make_one_gzip_file() -> None:
    pieces = ["a" * 100_000, "", "b"]

    assert gzip.decompress(b"".join(gzipped(pieces))) == "".join(pieces).encode()


REFUSED = [
    ("ranks=0:9", 400, "there are ranks 0 to 7"),
    ("ranks=3:1", 400, "ends before it begins"),
    ("ranks=a", 400, "expected numbers and FIRST:LAST"),
    ("ranks=1,,2", 400, "expected numbers"),
    (f"ranks={'9' * 5000}", 400, "expected numbers"),
    ("rank=8", 400, "there are ranks 0 to 7"),
    ("first=5&last=4", 400, "it must not be before first=5"),
    ("first=90", 404, "no span of steps 90 to 90"),
    ("max_slices=0", 400, "max_slices"),
    ("round=7", 404, "7"),
]


def test_refusals_of_wrong_queries_name_the_mistake(client: TestClient) -> None:
    for query, status, message in REFUSED:
        response = client.get(f"/timeline?{query}")
        assert response.status_code == status, query
        assert message in response.json()["text"], query


def test_too_much_is_refused_before_it_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_SPANS_READ", 50)

    response = picture_client(PictureSource(run), router).get("/timeline?first=10&last=12")

    assert response.status_code == 413
    assert "more than 50; choose fewer steps or ranks" in response.json()["text"]


def test_job_without_a_full_step_names_the_recording_command(tmp_path: Path) -> None:
    tables = draw_job(LAYOUT, STEPS, 1).tables()
    few = [table for kind, table in tables.items() if kind.NAME != "spans"]
    client = picture_client(PictureSource(stored_events(tmp_path, *few)), router)

    response = client.get("/timeline")

    assert response.status_code == 404
    assert "megatrain diag set" in response.json()["text"]
    assert client.get("/timeline/steps").json()["steps"] == []


def test_ranks_of_a_large_job_are_a_pipeline_and_its_neighbors() -> None:
    layout = Layout(tp_size=8, pp_size=8, dp_size=192)

    chosen = default_ranks(layout, 777)

    assert set(layout.ranks_along(777, "pp")) <= set(chosen)
    assert set(layout.ranks_along(layout.ranks_along(777, "pp")[0], "tp")) <= set(chosen)
    assert len(chosen) <= 32
    assert default_ranks(Layout(dp_size=8)) == tuple(range(8))


# -- the ideal ---------------------------------------------------------------------------------------------------------

JOB = replace(
    PipelineJob(pp_size=3, dp_size=2, tp_size=2, num_microbatches=4, slow_cells={(1, 1): 1.5}, steps=(10, 20)),
    is_overlapped=True, separate_s=0.0, noise=0.05,
)  # fmt: skip
SPANS = recorded_spans(JOB.run(), JOB.shape)
ROSTER = make_roster(who_ran(JOB.shape), empty_groups(), ROUND)


def test_ideal_of_each_slice_is_that_of_the_model() -> None:
    model = make_model(*operations_of(SPANS, ROSTER, "job"))
    found = ideal_times(SPANS, SPANS, ROSTER, "job")

    assert (found.length_ns >= 0).all()
    assert found.ideal_s == pytest.approx(model.ideal_ends().max(), rel=1e-12)
    for name in ("forward-compute", "optimizer"):
        expected = {round(model.ideal_s[n] * 1e9) for n, key in enumerate(model.keys) if key.kind == name}
        rows = [row for row, number in enumerate(SPANS.operation) if operation_name(int(number)) == name]
        assert set(found.length_ns[rows].tolist()) == expected
    for step in (10, 20):
        rows = np.flatnonzero(SPANS.step == step)
        end = (found.begin_ns + found.length_ns)[rows].max()
        begin = SPANS.start_ns[rows[SPANS.operation[rows] == 3]].min() - found.begin_ns[rows].min()
        assert end - found.begin_ns[rows].min() == pytest.approx(found.ideal_s * 1e9, rel=1e-6)
        assert 0 <= begin < 1e9
    measured = what_if(model).without_gaps_s
    assert found.replayed_s.tolist() == pytest.approx([measured[10], measured[20]], rel=1e-12)


def test_slices_of_one_operation_have_one_ideal_on_all_ranks() -> None:
    found = ideal_times(SPANS, SPANS, ROSTER, "job")

    stage = (SPANS.rank // 4).tolist()
    by_operation: dict[tuple[int, ...], set[int]] = {}
    for row in range(len(stage)):
        key = (int(SPANS.operation[row]), stage[row], int(SPANS.step[row]), int(SPANS.microbatch[row]))
        if SPANS.microbatch[row] >= 0:
            by_operation.setdefault(key, set()).add(int(found.begin_ns[row]))
    assert by_operation
    assert all(len(begins) == 1 for begins in by_operation.values())


def test_slices_unknown_to_the_model_have_no_ideal() -> None:
    foreign = replace(select(SPANS, np.arange(3)), sequence=np.array([10**6, 10**6 + 1, 10**6 + 2]))

    found = ideal_times(foreign, SPANS, ROSTER, "job")

    assert found.length_ns.tolist() == [-1, -1, -1]
    assert not found.is_critical.any()


def test_critical_path_goes_through_the_slow_stage() -> None:
    found = ideal_times(SPANS, SPANS, ROSTER, "job")

    for step in (10, 20):
        rows = np.flatnonzero(found.is_critical & (SPANS.step == step))
        names = {operation_name(int(number)) for number in SPANS.operation[rows]}
        assert {"forward-compute", "backward-compute", "optimizer"} <= names
        computes = rows[np.isin(SPANS.operation[rows], [3, 4])]
        stages = SPANS.rank[computes] // 4
        assert set((SPANS.rank[computes] // 2 % 2).tolist()) == {1}  # the replica that contains the slow stage
        assert np.bincount(stages).argmax() == 1
        # One of the tensor-parallel ranks represents an operation.
        keys = list(zip(SPANS.rank[rows] // 2, SPANS.operation[rows], SPANS.sequence[rows] % 10**6, strict=True))
        assert len(keys) == len(set(keys))


def test_ideal_comes_in_the_order_of_the_slices(tmp_path: Path) -> None:
    client = picture_client(PictureSource(stored_events(tmp_path, SPANS, who_ran(JOB.shape))), router)

    fields, arrays = drawn(client, "first=20&last=20")
    reported, ideal = drawn(client, "first=20&last=20", "/timeline/ideal")

    # The what-if model covers the drawn steps.
    whole = select(SPANS, SPANS.step == 20)
    expected = ideal_times(whole, whole, ROSTER, "job")
    begin_of = {
        (int(rank), int(number)): (begin - int(fields["base_unix_ns"]), length, is_critical)
        for rank, number, begin, length, is_critical in zip(
            whole.rank,
            whole.sequence,
            expected.begin_ns.tolist(),
            expected.length_ns.tolist(),
            expected.is_critical.tolist(),
            strict=True,
        )
    }
    rank = arrays["track_rank"][np.repeat(arrays["line_track"], np.diff(arrays["line_first"]))]
    for place in range(len(rank)):
        key = (int(rank[place]), int(arrays["sequence"][place]))
        assert (ideal["begin"][place], ideal["length"][place], bool(ideal["is_critical"][place])) == begin_of[key]
    assert reported["problem"] == ""
    assert reported["ideal_s"] == expected.ideal_s
    assert expected.is_critical.any()
    assert ideal["steps"].tolist() == [20]


def test_timeline_without_an_ideal_gives_the_reason(tmp_path: Path) -> None:
    """A rank has lost a forward of the only step."""
    tables = draw_job(LAYOUT, range(10, 11), 3).tables()
    spans = tables[Spans]
    assert isinstance(spans, Spans)
    is_lost = (spans.rank == 6) & (spans.operation == Op.FORWARD_COMPUTE.number) & (spans.microbatch == 1)
    directory = stored_events(tmp_path, *{**tables, Spans: select(spans, ~is_lost)}.values())
    client = picture_client(PictureSource(directory), router)

    fields, arrays = drawn(client, "first=10&last=10", "/timeline/ideal")

    assert "no step has all operations of all ranks: step 10 is left out" in fields["problem"]
    assert fields["ideal_s"] is None
    assert set(arrays["length"].tolist()) == {-1.0}


# -- the critical path, by hand ----------------------------------------------------------------------------------------


def path_of(
    num: int, edges: list[tuple[int, int]], groups: list[int], shared: list[bool], durations: list[list[float]]
):
    graph = build_replica_graph(num, edges, start_groups=groups, is_shared=shared)
    taken = np.array(durations, dtype=float)
    ends = evaluate_replicas(graph, taken.shape[1], 1, lambda number: taken[number][:, None])
    return critical_path(graph, ends[:, :, 0])


def test_critical_path_takes_the_longer_branch() -> None:
    #    0 -> 1 -> 3, 0 -> 2 -> 3
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]

    assert path_of(4, edges, [-1] * 4, [False] * 4, [[1], [5], [2], [1]]) == ((0, 0), (1, 0), (3, 0))
    assert path_of(4, edges, [-1] * 4, [False] * 4, [[1], [2], [5], [1]]) == ((0, 0), (2, 0), (3, 0))
    empty = build_replica_graph(0, [], start_groups=[], is_shared=[])
    assert critical_path(empty, np.zeros((0, 1))) == ()


def test_critical_path_continues_at_the_later_partner() -> None:
    # A send (1) and its receive (3) start together; the receiver was ready long before.
    edges = [(0, 1), (2, 3), (3, 4)]

    found = path_of(5, edges, [-1, 0, -1, 0, -1], [False] * 5, [[9], [1], [2], [1], [3]])

    assert found == ((0, 0), (1, 0), (3, 0), (4, 0))


def test_critical_path_continues_at_the_later_replica() -> None:
    # 1 is a collective of all replicas, 2 follows it.
    edges = [(0, 1), (1, 2)]

    found = path_of(3, edges, [-1] * 3, [False, True, False], [[1, 7, 2], [1, 1, 1], [5, 2, 1]])

    assert found == ((0, 1), (1, 1), (1, 0), (2, 0))


def test_download_waits_for_a_slot_and_releases_it(client: TestClient, run: Path) -> None:
    assert [client.get("/timeline/trace.json.gz").status_code for _ in range(2)] == [200, 200]
    assert picture_client(PictureSource(run), router, num_downloads=0).get("/timeline/trace.json.gz").status_code == 503
