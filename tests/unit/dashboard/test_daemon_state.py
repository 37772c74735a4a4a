"""The daemon's state file: written atomically and only on change; its reader reports malformed content."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.layout import Layout
from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence
from megatrain.contracts.records.record import encode
from megatrain_diagnostics.analysis.findings import Finding, StragglerAssessment, Thresholds
from megatrain_diagnostics.analysis.live import LiveDetection
from megatrain_diagnostics.collector.counters import IngestStatistics, RejectionReason
from megatrain_diagnostics.metrics.state_writer import StateWriter
from megatrain_diagnostics.store.daemon_state import (
    MAX_BYTES,
    STATE_NAME,
    DaemonState,
    ranges_of,
    ranks_of,
    read_state,
    scores_text,
    storable,
    write_state,
)
from tests.helpers.synthetic_steps import SyntheticJob

FINDING = Finding(
    cause=Cause.COMPUTE, confidence=VerdictConfidence.HIGH, ranks=(2, 3), hosts=("host-1",), first_step=40,
    last_step=89, num_steps=50, num_seen=49, excess=0.3, excess_s=0.2, score=8.0, wait_deficit_s=0.1, num_peers=3,
    victims=(0,), num_victims=3, step_s=1.2, gain_s=0.2, evidence=("it is slow",), scores={"host-1": 8.0},
)  # fmt: skip
STATE = DaemonState(
    job="demo", session="d1", written_unix_s=2.0, round=3, step=89,
    rank_scores=scores_text([0.5, 8.0]), host_scores={"host-1": 8.0}, findings=(FINDING,), first_step=80,
    last_step=89, num_steps=10, is_enough=True, silent=((4, 3),), without_peers=(),
    refused_rows={"flood": 2}, dropped_rows=1, connected_hosts=("host-0", "host-1"),
)  # fmt: skip


def test_written_state_is_read(tmp_path: Path) -> None:
    assert read_state(tmp_path / "none") == (None, "")
    write_state(tmp_path / "diagnosis", STATE)
    found, problem = read_state(tmp_path / "diagnosis")
    assert (found, problem) == (STATE, "")
    assert found is not None
    assert found.scores().tolist() == [0.5, 8.0]
    assert found.silent_ranks == (4, 5, 6)
    assert [path.name for path in (tmp_path / "diagnosis").iterdir()] == [STATE_NAME]


def test_malformed_state_is_reported(tmp_path: Path) -> None:
    contents = {
        "empty": b"",
        "torn": b"{",
        "list": b"[]",
        "newer": b'{"schema_version": 9}',
        "other types": b'{"schema_version": 1, "job": 7}',
        "no text": b"\xff\xfe",
        "huge": encode(STATE) + b" " * MAX_BYTES,
    }
    for name, content in contents.items():
        (tmp_path / STATE_NAME).write_bytes(content)
        found, problem = read_state(tmp_path)
        assert found is None, name
        assert STATE_NAME in problem, name


def test_malformed_scores_are_ignored() -> None:
    for text in ("!", "AAA", "AAAAAAA="):
        assert replace(STATE, rank_scores=text).scores().tolist() == [], text
    nan = replace(STATE, rank_scores=scores_text([float("nan")]))
    assert nan.scores().tolist() == [0.0]


def test_ranges_of_ranks() -> None:
    assert ranges_of([5, 1, 2, 3, 9]) == ((1, 3), (5, 1), (9, 1))
    assert ranks_of(((1, 3), (9, 1))) == (1, 2, 3, 9)
    assert ranks_of(((0, 2**40),)) == ()
    assert ranks_of(((-1, 2),)) == ranks_of(((1,),)) == ()


def test_the_state_of_the_largest_job_is_small() -> None:
    scores = scores_text(np.random.default_rng(1).normal(size=12_288))
    hosts = {f"host-{number:04d}.cluster.example": 1.25 for number in range(1536)}
    size = len(json.dumps({"scores": scores, "hosts": hosts}))
    assert size < 150_000


def test_findings_with_infinite_figures_are_not_stored() -> None:
    bad = replace(FINDING, score=float("inf"))
    assert storable([bad, FINDING]) == (FINDING,)
    assert len(storable([FINDING] * 500)) == 100


@dataclass
class Judge:
    """A judge with given knowledge."""

    round: int = 3
    assessment: StragglerAssessment = field(default_factory=StragglerAssessment)
    step: int | None = None

    def silent_ranks(self) -> tuple[int, ...]:
        return (7,)


def judged() -> LiveDetection:
    job = SyntheticJob(Layout(dp_size=4), compute_factor={2: 1.5})
    live = LiveDetection(job.roster(), Thresholds())
    for step in range(20):
        totals, _ = job.step(step)
        live.add_totals(totals, 0.0)
        live.advance(0.0)
    return live


def test_state_is_written_only_when_it_changes(tmp_path: Path) -> None:
    judge, statistics, problem = Judge(), IngestStatistics(), [""]
    record = DaemonRecord("here", "d1", "127.0.0.1", 1, "secret", started_unix_s=5.0)
    writer = StateWriter(tmp_path, "demo", record, judge, statistics, lambda: problem[0])
    assert writer.write(100.0)
    assert not writer.write(101.0)
    statistics.count_refused_rows(RejectionReason.FLOOD, "host-1", 5)
    statistics.count_refused_batch(RejectionReason.FLOOD, "host-1", "example")
    statistics.record_dropped_rows("host-1", "s", 4)
    statistics.count_stream(1, "host-1")
    live = judged()
    judge.step, judge.assessment = live.step, live.assessment
    assert writer.write(102.0)
    found, _ = read_state(tmp_path)
    assert found is not None
    assert (found.written_unix_s, found.refused_rows, found.dropped_rows) == (102.0, {"flood": 6}, 4)
    assert (found.connected_hosts, found.silent_ranks, found.round) == (("host-1",), (7,), 3)
    assert found.scores().shape == (4,)
    assert found.scores().argmax() == 2
    assert (found.host_scores, found.thresholds) == (live.assessment.host_scores, live.assessment.thresholds)
    assert "secret" not in (tmp_path / STATE_NAME).read_text()
    statistics.count_stream(-1, "host-1")
    assert writer.write(103.0)
    found, _ = read_state(tmp_path)
    assert found is not None
    assert found.connected_hosts == ()


def test_unwritable_state_file_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "diagnosis").write_text("a file")
    record = DaemonRecord("here", "d1", "127.0.0.1", 1, "")
    writer = StateWriter(tmp_path / "diagnosis", "demo", record, Judge(), IngestStatistics(), lambda: "")
    assert not writer.write(1.0)
    assert not writer.write(2.0)
    assert caplog.text.count("the state for the dashboard cannot be written") == 1
