"""A hang over HTTP as in the command; every place that names a culprit names that of the incident."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.incident import IncidentKind
from megatrain.contracts.records.record import encode
from megatrain.run_files.run_directory import RunDirectory, black_box_path, kept_black_box
from megatrain.telemetry.recorder import open_recorder
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import Groups, Ranks, Spans
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.hung_spans import LATE, group_of_four, open_spans
from tests.helpers.launched_job import make_incident
from tests.helpers.named_culprits import named_by_commands, named_by_page
from tests.helpers.recorded_run import write_recorded_run
from tests.helpers.served_run import RecordedPage
from tests.helpers.waiting import wait_until

LAYOUT = Layout(dp_size=4)
ROUND, WAITS = 2, 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run whose round 2 hung: rank 3 computes while the others wait for it."""
    root = tmp_path_factory.mktemp("hang")
    run = write_recorded_run(root / "run").run
    kept = run.incidents / f"round-{ROUND:06d}"
    kept.mkdir()
    boxes = root / "boxes"
    boxes.mkdir()
    recorders = []
    for rank in range(4):
        identity = Identity("demo", "main", ROUND, rank, LAYOUT, os.getpid(), f"host-{rank // 2}")
        recorder = open_recorder(identity, directory=str(boxes), run_key=run.key, num_records=256)
        group = recorder.add_group("dp", LAYOUT.ranks_along(rank, "dp"))
        recorder.set_step(120)
        if rank == LATE:
            recorder.begin(Operation.FORWARD_COMPUTE)
        else:
            recorder.await_end(recorder.begin(Operation.DP_ALL_REDUCE, group=group))
        recorders.append(recorder)
    for rank in range(4):
        shutil.copy(black_box_path(boxes, "demo", run.key, "main", ROUND, rank), kept_black_box(kept, rank))
    for recorder in recorders:
        recorder.close()
    return run


@pytest.fixture(scope="module")
def hung(run: RunDirectory) -> Iterator[RecordedPage]:
    with closing(RecordedPage(run)) as found:
        yield found


@pytest.mark.slow
def test_hang_response_equals_that_of_the_command(
    hung: RecordedPage, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    found = hung.ask("hang")
    assert main(["diag", "hang", str(run.root), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (found["round"], found["source"]) == (ROUND, printed["source"])
    expected = (printed["confidence"], printed["reason"], printed["suspects"])
    assert (found["confidence"], found["reason"], found["suspects"]) == expected
    assert [one["rank"] for one in found["suspects"]] == [LATE]
    assert [one["waiting"] for one in found["missing"]] == [one["waiting"] for one in printed["missing"]] == [[0, 1, 2]]
    assert [one["num_ranks"] for one in found["stack_clusters"]] == [3, 1]
    assert found["outlier_ranks"] == printed["stacks"]["outliers"] == [LATE]


def test_a_rank_has_its_last_position(hung: RecordedPage) -> None:
    waits, late = hung.ask(f"ranks/{WAITS}"), hung.ask(f"ranks/{LATE}")
    expected = ("dp-all-reduce", 120, [{"group": "dp:0+4x1", "entered": 1, "left": 0}])
    assert (waits["operation"], waits["step"], waits["positions"]) == expected
    assert late["operation"] == "forward-compute"
    assert any("never entered collective 1" in text for text in late["findings"])
    assert waits["findings"] == []
    assert late["black_box"] == f"incidents/round-{ROUND:06d}/rank-{LATE:05d}.blackbox"


def test_another_round_has_no_hang(hung: RecordedPage) -> None:
    assert hung.ask("hang?round=1")["source"] == ""
    assert "there are 1, 2" in hung.ask("hang?round=7", 404)["text"]


@pytest.mark.slow
def test_spans_are_read_only_where_an_incident_reports_a_hang(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    made = write_recorded_run(tmp_path / "other").jobs[1]
    with SegmentStore(run.events) as store:
        store.append(Ranks, to_arrow(made.ranks()))
        store.append(Groups, to_arrow(group_of_four(1)))
        store.append(Spans, to_arrow(open_spans(1)))
        store.commit()
    with closing(RecordedPage(run)) as page:
        assert page.ask("hang")["source"] == ""
        hang = replace(make_incident(), kind=IncidentKind.HANG, round=1)
        (run.incidents / f"{hang.incident_id}.json").write_bytes(encode(hang))
        wait_until(lambda: page.ask("hang")["source"] == "spans", "the answer")
        assert [one["rank"] for one in page.ask("hang")["suspects"]] == [LATE]


SAMPLE = Path(__file__).parents[2] / "golden" / "dashboard-sample"
FAULTS = {"killed": (2, 5, "host-2"), "stopped": (3, 3, "host-4")}
"""Fault -> round, rank, host."""


@pytest.fixture(scope="module")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return RunDirectory(Path(shutil.copytree(SAMPLE, tmp_path_factory.mktemp("sample") / "run")))


@pytest.fixture(scope="module")
def page(sample_run: RunDirectory) -> Iterator[RecordedPage]:
    with closing(RecordedPage(sample_run)) as found:
        yield found


@pytest.mark.slow(kept=["killed"])
@pytest.mark.parametrize("fault", FAULTS)
def test_all_views_name_the_culprit_of_the_incident(
    sample_run: RunDirectory, page: RecordedPage, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    round_number, rank, host = FAULTS[fault]
    named = named_by_page(page, round_number) | named_by_commands(sample_run, round_number, capsys)
    assert ("hang" in named) is (fault == "stopped"), "no positions of ranks are kept for the killed rank"
    assert named == dict.fromkeys(named, ([rank], [host]))


@pytest.mark.parametrize("fault", FAULTS)
def test_lines_of_victims_are_listed_as_consequences(page: RecordedPage, fault: str) -> None:
    round_number, rank, _ = FAULTS[fault]
    causes = page.ask(f"logs/causes?round={round_number}")["causes"]
    assert causes[0]["rank"] == rank
    victims = causes[1:]
    assert {victim["role"] for victim in victims} <= {"follows"}
    for victim in victims:
        found = page.ask("logs", round=round_number, query=victim["line"][:60])
        assert victim["rank"] in [line["rank"] for line in found["lines"]]


def test_host_of_victims_lists_the_incident(page: RecordedPage) -> None:
    host = page.ask("hosts/host-0")
    assert host["incident_ids"] == []
    assert len(host["victim_incident_ids"]) == 1


@pytest.mark.slow
def test_score_of_a_host_is_the_same_in_all_views(
    sample_run: RunDirectory, page: RecordedPage, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, stragglers = (page.ask(view) for view in ("hosts", "stragglers"))
    by_host = {straggler["host"]: straggler["score"] for straggler in stragglers["scores"]}
    assert {host["host"]: host["straggler_score"] for host in hosts["hosts"] if host["host"] in by_host} == by_host
    ranks: dict[str, float] = {}
    for number in range(8):
        rank = page.ask(f"ranks/{number}")
        ranks[rank["host"]] = max(rank["score"], ranks.get(rank["host"], 0.0))
        assert rank["least_score"] == stragglers["thresholds"]["score"]
    assert ranks == pytest.approx(by_host)
    assert main(["diag", "stragglers", str(sample_run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_scores"] == by_host
    assert hosts["thresholds"] == stragglers["thresholds"]
    assert stragglers["findings"] == []
    assert max(by_host.values()) < stragglers["thresholds"]["score"], "no host is slow, so none has a high score"
