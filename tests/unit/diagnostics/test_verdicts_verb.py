"""`megatrain diag verdicts`: from etcd, and from the audit where etcd is gone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.contracts.errors import NotFoundError, UsageError
from megatrain.contracts.records.host_verdict import (
    AuditEntry,
    Cause,
    HostVerdict,
    OutcomeKind,
    VerdictConfidence,
    VerdictKind,
    VerdictOutcome,
)
from megatrain.run_files.incidents import AUDIT_NAME, append_to_audit
from megatrain_diagnostics.commands.verdicts import VerdictWithOutcome, case_lines, cases_lines, matching_case

VERDICT = HostVerdict(
    "20271121-1", VerdictKind.STRAGGLER, 3, Cause.COMPUTE, VerdictConfidence.HIGH, 1000.0, "daemon-1", ("host-2",),
    (4, 5), ("its forward takes 1.3 x its peers'", "it is the last at every reduce-scatter"), 10, 20, 0.5, 0.1,
)  # fmt: skip
OUTCOME = VerdictOutcome(
    "20271121-1", OutcomeKind.DECLINED, "the gain is less than the cost", "host-1", 1001.0, gain_s=5, cost_s=9
)
CASE = VerdictWithOutcome(VERDICT.verdict_id, VERDICT, OUTCOME)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "incidents" / AUDIT_NAME
    path.parent.mkdir(parents=True)
    waiting = replace(OUTCOME, kind=OutcomeKind.WAITING, reason="waits for a person")
    append_to_audit(path, AuditEntry(waiting, VERDICT))
    append_to_audit(path, AuditEntry(replace(OUTCOME, verdict_id="20271121-2", reason="cannot be read")))
    append_to_audit(path, AuditEntry(OUTCOME, VERDICT))
    return tmp_path / "run"


def test_the_audit_is_read_where_etcd_is_gone(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diag", "verdicts", "--job", str(run_directory), "--json"]) == 0
    reported = capsys.readouterr()
    found = json.loads(reported.out)
    assert "does not answer; this is from" in reported.err
    assert [one["verdict_id"] for one in found["verdicts"]] == ["20271121-2", "20271121-1"]
    assert found["verdicts"][0]["verdict"] is None
    # the newest outcome of a verdict counts
    assert found["verdicts"][1]["outcome"]["kind"] == "declined"
    assert found["verdicts"][1]["verdict"]["hosts"] == ["host-2"]


def test_text_of_one_verdict(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diag", "verdicts", str(run_directory), "--id", "20271121-1"]) == 0
    reported = capsys.readouterr().out
    for text in (
        "straggler, compute, confidence high",
        "host-2; ranks 4-5",
        "the gain is less than the cost",
        "gain 5 s, cost 9 s",
    ):
        assert text in reported
    assert "  1. its forward takes 1.3 x its peers'" in reported


def test_a_run_without_a_verdict_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "incidents").mkdir()
    assert main(["diag", "verdicts", "--job", str(tmp_path)]) == 0
    assert ": 0 verdicts" in capsys.readouterr().out
    (tmp_path / "incidents").rmdir()
    assert main(["diag", "verdicts", "--job", str(tmp_path)]) != 0
    assert capsys.readouterr().out == ""


def test_table_lists_verdicts_and_outcomes_without_the_other() -> None:
    cases = [CASE, VerdictWithOutcome("20271121-2", None, OUTCOME), VerdictWithOutcome("20271121-3", VERDICT, None)]
    lines = cases_lines("demo", cases, 1060.0)
    assert lines[0] == "demo: 3 verdicts"
    assert [line.split()[0] for line in lines[3:]] == ["20271121-3", "20271121-2", "20271121-1"]
    assert "no outcome yet" in lines[3]
    assert cases_lines("demo", [], 0.0) == ["demo: 0 verdicts"]


def test_proposed_rollback_is_reported() -> None:
    numerics = replace(VERDICT, kind=VerdictKind.NUMERICS, rollback_to=40, skip_from=41, skip_to=43)
    assert "back to step 40 or before, without the batches of steps 41 to 43" in "\n".join(
        case_lines(VerdictWithOutcome("v", numerics, None))
    )


def test_ambiguous_and_unknown_ids_are_refused() -> None:
    cases = [CASE, replace(CASE, verdict_id="20271121-12")]
    assert matching_case("demo", cases, "20271121-1") is CASE
    with pytest.raises(UsageError, match="2 verdicts begin with '20271121': 20271121-1 and 20271121-12"):
        matching_case("demo", cases, "20271121")
    with pytest.raises(NotFoundError, match="demo has no verdict 'x'; it has 20271121-1 and 20271121-12"):
        matching_case("demo", cases, "x")
