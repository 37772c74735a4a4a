"""`megatrain logs`: searches and classifies the output of all ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.cli import main
from megatrain.contracts.layout import Layout
from megatrain.contracts.records.incident import IncidentKind
from megatrain.contracts.records.record import encode
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics.analysis.log_search import classify_logs, matching_lines
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import LogLines, Ranks
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_job.failures.culprit import Culprit, FailureRole
from tests.helpers.launched_job import make_incident
from tests.helpers.synthetic_steps import SyntheticJob
from tests.helpers.table_rows import table_rows

ERROR = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
LOST = "RuntimeError: Connection closed by peer [10.0.0.3]:5520"
ROSTER = Roster(1, Layout(dp_size=4), {rank: f"host-{rank // 2}" for rank in range(4)}, {})


def log_lines(rows: Sequence[tuple[int, int, str]]) -> LogLines:
    """Return lines of (rank, second, text)."""
    rank, second, line = zip(*rows, strict=True)
    columns = {
        "round": 1, "rank": rank, "sequence": range(0, 100 * len(rows), 100), "at_ns": np.array(second) * 10**9,
        "host": [f"host-{number // 2}" for number in rank], "line": line,
    }  # fmt: skip
    return table_rows(LogLines, columns)


FAILED = [(0, 11, LOST), (1, 11, LOST), (3, 12, LOST), (2, 10, ERROR), (0, 1, "step 1"), (2, 1, "step 1")]


def test_lines_match_in_order_of_time() -> None:
    logs = log_lines(FAILED)
    assert [str(logs.line[row]) for row in matching_lines(logs, None)] == ["step 1"] * 2 + [ERROR] + [LOST] * 3
    assert [int(logs.rank[row]) for row in matching_lines(logs, re.compile("closed by"))] == [0, 1, 3]
    assert len(matching_lines(logs, re.compile("no such"))) == 0


def test_root_failure_is_distinguished_from_its_consequences() -> None:
    found = classify_logs(log_lines(sorted(FAILED, key=lambda row: row[1])), ROSTER)
    assert found.culprit.ranks == (2,)
    assert (found.num_ranks, found.num_lines) == (4, 6)
    first, *others = found.failures
    assert (first.rank, first.host, first.label, first.role, first.at_ns) == (
        2,
        "host-1",
        "gpu_hardware",
        FailureRole.ROOT,
        10**10,
    )
    assert sorted(other.rank for other in others) == [0, 1, 3]
    assert {other.role for other in others} == {FailureRole.FOLLOWS}
    assert "ECC" in first.line


def test_silent_rank_is_the_root_where_others_wait() -> None:
    waits = "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"
    found = classify_logs(log_lines([(rank, 5, waits) for rank in (0, 1, 3)]), ROSTER)
    assert found.culprit.ranks == (2,)
    assert found.failures[0].rank == 2
    assert classify_logs(log_lines([(0, 1, "step 1")]), ROSTER).failures == ()


@pytest.fixture
def place(tmp_path: Path) -> str:
    with SegmentStore(tmp_path / "events") as store:
        store.append(LogLines, to_arrow(log_lines(sorted(FAILED, key=lambda row: row[1]))))
        store.commit()
    return str(tmp_path / "events")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["logs", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_logs_are_searched(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, place, "--grep", "closed by peer", "--ranks", "0,3", "--last", "1")
    assert (found["num_matching"], [one["rank"] for one in found["lines"]]) == (2, [3])
    assert found["lines"][0]["line"] == LOST
    assert main(["logs", place, "--grep", "ECC"]) == 0
    assert capsys.readouterr().out == f"1970-01-01 00:00:10 UTC rank 2 host-1: {ERROR}\n"
    assert {one["host"] for one in printed(capsys, place, "--host", "host-1")["lines"]} == {"host-1"}
    assert main(["logs", place, "--grep", "no such"]) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "megatrain: none of 6 lines matches\n")


def test_logs_are_classified(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "classify", place)
    assert (found["label"], found["root_rank"], found["failures"][0]["rank"]) == ("gpu_hardware", 2, 2)
    assert main(["logs", "classify", place]) == 0
    text = capsys.readouterr().out
    assert "began at  rank 2 on host-1" in text
    assert re.search(r"2 +host-1 +root +gpu_hardware", text)


def test_rounds_that_failed_before_they_had_ranks_are_found(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    with SegmentStore(Path(place)) as store:
        store.append(Ranks, to_arrow(SyntheticJob(Layout(dp_size=4), round=1).ranks()))
        for number in (2, 3):
            lines = log_lines([(0, 20, f"ModuleNotFoundError in round {number}")])
            store.append(LogLines, to_arrow(replace(lines, round=lines.round * number)))
        store.commit()

    assert printed(capsys, place)["lines"][0]["line"] == "ModuleNotFoundError in round 3"
    assert printed(capsys, place, "--round", "2")["lines"][0]["line"] == "ModuleNotFoundError in round 2"
    assert printed(capsys, place, "--round", "1")["num_matching"] == len(FAILED)


def test_search_that_cannot_match_is_an_error(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", place, "--host", "unknown"]) == 72
    assert "no line is from host 'unknown'; there are host-0" in capsys.readouterr().err
    assert main(["logs", "classify", place, "--text"]) == 2
    assert "--text is for a FILE" in capsys.readouterr().err
    assert main(["logs", place, "--round", "9"]) == 72
    assert "--round=9: " in capsys.readouterr().err
    assert main(["logs", place, "--grep", "("]) != 0
    assert "is not a valid regular expression" in capsys.readouterr().err
    assert main(["logs", place, "--ranks", "9"]) != 0
    assert "no line of output" in capsys.readouterr().err


def test_culprit_of_the_incident_is_the_root() -> None:
    # rank 3 was killed without output, rank 2 was killed with the round: the logs alone would blame rank 0
    lines = log_lines([(0, 11, LOST), (1, 12, LOST), (2, 1, "step 1"), (3, 1, "step 1")])
    assert classify_logs(lines, ROSTER).culprit.hosts == ("host-0",), "the case in which they blame it"
    recorded = Culprit((3,), ("host-1",), "rank 3 was killed by SIGKILL (9)", action="restart", incident="20260101-1",
                       kind=IncidentKind.FAILURE)  # fmt: skip
    found = classify_logs(lines, ROSTER, recorded)
    assert found.culprit == recorded
    assert [(failure.rank, failure.role) for failure in found.failures] == [
        (3, FailureRole.ROOT),
        (0, FailureRole.FOLLOWS),
        (1, FailureRole.FOLLOWS),
    ]
    assert (found.label, found.action, found.classification.line) == ("failure", "restart", "")
    assert {failure.label for failure in found.failures[1:]} == {"network"}


def test_own_line_of_the_culprit_gives_the_cause() -> None:
    recorded = Culprit((2,), ("host-1",), "rank 2 ended with 1", label="gpu_hardware", incident="20260101-1",
                       kind=IncidentKind.FAILURE)  # fmt: skip
    found = classify_logs(log_lines(FAILED), ROSTER, recorded)
    assert (found.label, found.classification.line) == ("gpu_hardware", ERROR)
    assert found.failures[0].line == ERROR


def test_other_failure_beside_the_culprit_is_a_cause() -> None:
    recorded = Culprit((0,), ("host-0",), "rank 0 ended with 1", incident="20260101-1", kind=IncidentKind.FAILURE)
    found = classify_logs(log_lines(FAILED), ROSTER, recorded)
    roles = {failure.rank: failure.role for failure in found.failures}
    assert roles == {0: FailureRole.ROOT, 1: FailureRole.FOLLOWS, 2: FailureRole.CAUSE, 3: FailureRole.FOLLOWS}


def test_classification_uses_the_incident(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    incident = make_incident(round=1, culprit_ranks=(3,), culprit_hosts=("host-1",))
    (run.incidents / f"{incident.incident_id}.json").write_bytes(encode(incident))
    found = printed(capsys, "classify", str(tmp_path))
    assert (found["root_rank"], found["root_hosts"], found["incident"]) == (3, ["host-1"], incident.incident_id)
    assert main(["logs", "classify", str(tmp_path)]) == 0
    assert f"incident  {incident.incident_id}" in capsys.readouterr().out
