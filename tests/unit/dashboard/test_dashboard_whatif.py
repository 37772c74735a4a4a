"""What-if over HTTP: the figures of the command, which steps are replayed, and the gain and cost of each mitigation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from megatrain.cli import main
from megatrain.contracts.records.host_verdict import Cause
from megatrain.contracts.records.record import encode
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.stragglers.whatif_reader import WhatIfReader
from megatrain_dashboard.api.stragglers.whatif_view import RemedyCost, whatif_document
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import Ranks, Spans
from megatrain_diagnostics.store.daemon_state import write_state
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.launched_job import make_incident
from tests.helpers.pipeline_job import PipelineJob
from tests.helpers.recorded_spans import ROUND, recorded_spans, who_ran
from tests.helpers.served_run import RecordedPage
from tests.helpers.source_tree import ROOT
from tests.unit.dashboard.test_daemon_state import FINDING, STATE

JOB = PipelineJob(
    pp_size=3, dp_size=4, num_microbatches=5, slow_cells={(1, 1): 1.9}, is_overlapped=True, separate_s=0.0, noise=0.05
)
SLOW_RANK = 5
"""dp 1 of stage 1; two ranks a host."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    found = RunDirectory(tmp_path_factory.mktemp("whatif") / "run")
    found.create()
    with SegmentStore(found.events) as store:
        store.append(Ranks, to_arrow(who_ran(JOB.shape)))
        store.append(Spans, to_arrow(recorded_spans(JOB.run(), JOB.shape)))
        store.commit()
    (found.root / "config.toml").write_text((ROOT / "configs" / "demo.toml").read_text())
    (found.incidents / "one.json").write_bytes(encode(make_incident()))
    finding = replace(FINDING, hosts=("host2",), ranks=(SLOW_RANK,), gain_s=0.5, step_s=2.0)
    rotating = replace(finding, cause=Cause.LENGTHS, hosts=(), gain_s=0.1)
    write_state(found.diagnosis, replace(STATE, round=ROUND, findings=(finding, rotating)))
    return found


@pytest.fixture(scope="module")
def page(run: RunDirectory) -> Iterator[RecordedPage]:
    with closing(RecordedPage(run)) as found:
        yield found


def test_whatif_figures_equal_those_of_the_command(page: RecordedPage, capsys: pytest.CaptureFixture[str]) -> None:
    found = page.ask("whatif")
    assert main(["diag", "whatif", str(page.source.run.root), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert found["slowdown"] == pytest.approx(printed["blocking_slowdown"], rel=1e-9)
    assert (found["m_w"], found["m_s"]) == (pytest.approx(printed["Mw"]), pytest.approx(printed["Ms"]))
    assert found["steps"] == sorted(map(int, printed["step_t_base"]))
    assert found["worst_ranks"] == printed["worst_ranks"]
    by_stage = {one["name"]: one["slowdown"] for one in found["by_stage"]}
    assert by_stage == pytest.approx(printed["blocking_decompose_by_stage"])
    by_step = [printed["blocking_step_slowdown"][str(step)] for step in found["steps"]]
    assert found["slowdown_by_step"] == pytest.approx(by_step)
    assert found["worst_ranks"] == [SLOW_RANK]


def test_each_mitigation_is_weighed_by_the_drivers_rule(page: RecordedPage) -> None:
    found = page.ask("whatif")
    actions = found["actions"]
    # The finding's host is the host of the worst rank, so it is reported once.
    assert next((action["action"], action["target"]) for action in actions) == ("evict", "host2")
    assert [action["action"] for action in actions].count("evict") == 1
    assert actions[-1]["action"] == "nothing"
    evict = actions[0]
    # the run has reported no completed step
    assert evict["gain_s"] is None
    assert evict["cost_s"] == pytest.approx(3.2)
    assert "measured" in evict["text"]
    causes = {one["name"]: one["slowdown"] for one in found["by_cause"]}
    assert causes == {"compute": pytest.approx(2.0 / 1.5), "sequence-length": pytest.approx(2.0 / 1.9)}


@pytest.mark.slow
def test_only_the_newest_steps_are_replayed_and_that_is_reported(page: RecordedPage) -> None:
    everything = page.ask("whatif")["steps"]
    roster = page.source.roster(None)
    few = WhatIfReader(page.source.events, most_operations=1).replayed(roster, None, None, "job")
    assert list(few.result.measured_s) == everything[-1:]
    assert few.notes == (f"only the newest 1 of {len(everything)} fully recorded steps are replayed",)
    one = page.ask(f"whatif?first={everything[1]}&last={everything[1]}")
    assert one["steps"] == [everything[1]]
    assert "steps that some ranks recorded: " in page.ask("whatif?first=100000", 404)["text"]


def test_a_result_is_made_once(page: RecordedPage) -> None:
    reader, roster = WhatIfReader(page.source.events), page.source.roster(None)
    assert reader.replayed(roster, None, None, "job") is reader.replayed(roster, None, None, "job")


def test_eviction_is_worth_it_if_it_gains_more_than_its_cost(page: RecordedPage) -> None:
    result = WhatIfReader(page.source.events).replayed(page.source.roster(None), None, None, "job").result
    finding = replace(FINDING, gain_s=0.5)
    again = replace(finding, cause=Cause.NETWORK, gain_s=0.1)
    for remaining, cost_s, is_worth_it in ((100, 49.0, True), (100, 51.0, False), (None, 1.0, None)):
        document = whatif_document(3, result, [finding, again], [], RemedyCost(remaining, cost_s, "here"))
        assert [action.action for action in document.actions].count("evict") == 1
        first = document.actions[0]
        assert (first.action, first.target, first.is_worth_it) == ("evict", "host-1", is_worth_it), cost_s
        assert first.gain_s == (None if remaining is None else pytest.approx(50.0))


def test_a_replay_that_takes_longer_than_its_step_is_reported(page: RecordedPage) -> None:
    result = WhatIfReader(page.source.events).replayed(page.source.roster(None), None, None, "job").result
    for measured_part, is_reported in ((1.0, False), (1.2, True)):
        measured_s = {step: value / measured_part for step, value in result.without_gaps_s.items()}
        document = whatif_document(3, replace(result, measured_s=measured_s), [], [], RemedyCost(None, 1.0, "here"))
        assert document.slowdown == pytest.approx(document.replayed_s / document.ideal_s)
        assert document.replayed_s == pytest.approx(document.measured_s * measured_part)
        assert any("A replayed step" in note for note in document.notes) == is_reported, measured_part
