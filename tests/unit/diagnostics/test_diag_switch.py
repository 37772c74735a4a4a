"""`megatrain diag on|off|set` and `diag verdicts`: settings in etcd, and verdicts there and in the audit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.contracts.errors import NotFoundError, UsageError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.host_verdict import (
    AuditEntry,
    Cause,
    HostVerdict,
    OutcomeKind,
    VerdictConfidence,
    VerdictKind,
    VerdictOutcome,
)
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import JobRecord
from megatrain.run_files.incidents import AUDIT_NAME, append_to_audit
from megatrain_diagnostics.commands.verdicts import VerdictWithOutcome, case_lines, cases_lines, matching_case
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from tests.helpers.etcd_proxy import EtcdProxy
from tests.helpers.etcd_server import EtcdServers

KEYS = JobKeys("demo")
Switch = Callable[..., DiagSettings]


@pytest.fixture(scope="module")
def client(etcd: EtcdServers) -> Iterator[EtcdClient]:
    """A client of an etcd with a job whose configuration streams one step in 7."""
    with EtcdClient(EtcdSettings.of(etcd.urls)) as one:
        yield one
        one.delete(KeyRange.prefix(KEYS.prefix))


@pytest.fixture
def diag(client: EtcdClient, capsys: pytest.CaptureFixture[str]) -> Switch:
    config = {"diagnostics.sample_period": "7"}
    client.delete(KEYS.diag_settings)
    client.put(KEYS.record, encode(JobRecord("demo", "", "", config, 1, 1, 1, "run", "a", 0.0)))
    endpoint = f"--rdzv-endpoint={client.settings.endpoints[0]}"

    def run(*arguments: str) -> DiagSettings:
        assert main(["diag", *arguments, "demo", endpoint]) == 0
        item = client.get(KEYS.diag_settings)
        return DiagSettings() if item is None else decode(DiagSettings, item.value, KEYS.diag_settings)

    return run


def test_off_and_on_use_the_configured_period(diag: Switch, client: EtcdClient) -> None:
    before = time.time()
    settings = diag("off", "--reason=too slow")
    assert (settings.is_on, settings.span_mask(), settings.sample_period, settings.reason) == (False, 0, 7, "too slow")
    assert "@" in settings.by
    assert before <= settings.at_unix_s <= time.time()
    settings = diag("on")
    assert (settings.is_on, settings.sample_period, settings.off_operations) == (True, 7, ())
    config = {"diagnostics.sample_period": str(2**31 - 1)}
    client.put(KEYS.record, encode(JobRecord("demo", "", "", config, 1, 1, 1, "run", "a", 0.0)))
    assert diag("on").sample_period == 2**31 - 1


def test_request_changes_only_what_it_names(diag: Switch, client: EtcdClient) -> None:
    diag("set", "--without=tp-all-gather,gc")
    settings = diag("set", "--sample-period=50")
    assert (settings.sample_period, settings.off_operations) == (50, ("gc", "tp-all-gather"))
    before = time.time()
    settings = diag("set", "--full-for=60")
    assert before + 60 <= settings.full_until_unix_s <= time.time() + 60
    assert (settings.period_at(before), settings.period_at(before + 120)) == (1, 50)
    assert diag("set", "--full-for=0").full_until_unix_s == 0.0
    assert diag("set", "--without=").off_operations == ()
    assert diag("on").sample_period == 7


def test_without_a_request_the_current_settings_are_printed(
    diag: Switch, client: EtcdClient, capsys: pytest.CaptureFixture[str]
) -> None:
    diag("set")
    assert client.get(KEYS.diag_settings) is None, "nothing is written"
    assert "one step in 7" in capsys.readouterr().out
    diag("set", "--without=gc", "--json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (document["job"], document["off_operations"], document["schema_version"]) == ("demo", ["gc"], 1)
    diag("off")
    assert "not timed (`megatrain diag on` times them)" in capsys.readouterr().out


def test_unreadable_switch_is_replaced_only_on_request(
    diag: Switch, client: EtcdClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.put(KEYS.diag_settings, b'{"schema_version": 1, "sample_period": "x"}')
    assert main(["diag", "set", "demo", f"--rdzv-endpoint={client.settings.endpoints[0]}"]) != 0
    assert "sample_period" in capsys.readouterr().err
    assert diag("on").sample_period == 7


def test_two_requests_at_once_both_take_effect(
    diag: Switch, client: EtcdClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """The daemon requests full steps between the read and the write of the command."""
    others = [DiagSettings(full_until_unix_s=5e9, sample_period=9)]

    def interrupt(request: bytes) -> None:
        if b"/v3/kv/txn" in request and others:
            client.put(KEYS.diag_settings, encode(others.pop()))

    with EtcdProxy(client.settings.endpoints[0].port) as proxy:
        proxy.before = interrupt
        assert main(["diag", "set", "--without=gc", "demo", f"--rdzv-endpoint={proxy.url}"]) == 0
    assert not others
    settings = diag("set")
    assert (settings.full_until_unix_s, settings.sample_period, settings.off_operations) == (5e9, 9, ("gc",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set", "--without=gc,forward"], "'forward' is not an operation; use step, data-wait"),
        (["set", "--sample-period=0"], "from 1 to 2147483647"),
        (["set", "--full-for=nan"], "seconds from 0 to 604800"),
        (["off", "--sample-period=3"], "unknown argument '--sample-period=3'"),
    ],
)
def test_invalid_request_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diag", *arguments, "demo"]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_unknown_job_is_reported(client: EtcdClient, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = f"--rdzv-endpoint={client.settings.endpoints[0]}"
    assert main(["diag", "on", "other", endpoint]) != 0
    assert "etcd has no job of this name" in capsys.readouterr().err


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
    assert "note: not read from etcd (" in reported.err
    assert "); this is from " in reported.err
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
