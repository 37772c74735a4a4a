"""The health checks of a host: every check has its own deadline, and the report arrives whatever a check does."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatrain.config.load import load_config
from megatrain.contracts.black_box.encoding import box_bytes
from megatrain.contracts.errors import DataError
from megatrain.contracts.records.host_records import CheckOutcome, CheckReport
from megatrain.contracts.records.record import decode, encode
from megatrain_launcher.health.checks import CHECKS, Check, run_checks
from megatrain_launcher.health.child import ProbeEnd
from megatrain_launcher.health.context import (
    HealthContext,
    HealthFinding,
    Places,
    context_of,
    failed,
    history_path,
    passed,
)
from megatrain_launcher.health.history import HealthHistory, read_history
from tests.helpers.health_contexts import health_context
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S


def outcomes(report: CheckReport) -> dict[str, str]:
    return {result.name: str(result.outcome) for result in report.results}


def test_stuck_check_fails_at_its_deadline(tmp_path: Path) -> None:
    release = threading.Event()
    ended: list[HealthContext] = []

    def stuck(context: HealthContext, history: HealthHistory) -> list[HealthFinding]:
        release.wait(DEADLINE_S)
        ended.append(context)
        return [passed("one", ""), passed("two", "")]

    try:
        report = run_checks(
            health_context(tmp_path),
            [
                Check(("one", "two"), stuck, 0.2),
                Check(("minor",), stuck, 0.2, is_needed=False),
                Check(("well",), lambda context, history: [passed("well", "fine")], 5.0),
            ],
        )
        assert not ended, "they are still stuck"
    finally:
        release.set()
    assert outcomes(report) == {"one": "failed", "two": "failed", "minor": "warning", "well": "passed"}
    assert [(result.name, result.detail) for result in report.failed] == [
        (name, "no answer within 0.2 s") for name in ("one", "two")
    ]
    assert report.results[0].duration_s >= 0.2


def test_only_hung_checks_that_a_host_needs_make_it_unfit(tmp_path: Path) -> None:
    release = threading.Event()

    def stuck(context: HealthContext, history: HealthHistory) -> list[HealthFinding]:
        release.wait(DEADLINE_S)
        return []

    try:
        report = run_checks(health_context(tmp_path), [replace(check, run=stuck, deadline_s=0.0) for check in CHECKS])
    finally:
        release.set()
    needed = {"gpu-driver", "gpu-count", "gpu-state", "disk", "shared-memory", "matmul", "memory-copy", "loopback"}
    assert {result.name for result in report.failed} == needed
    assert {name for name, outcome in outcomes(report).items() if outcome == "warning"} == {
        "kernel-log", "memory", "memory-errors", "open-files", "locked-memory", "clock", "network", "infiniband"
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_check_that_raises_leaves_the_host_fit(tmp_path: Path) -> None:
    def broken(context: HealthContext, history: HealthHistory, error: Exception) -> list[HealthFinding]:
        raise error

    errors = [(OSError("no"), "could not be run: no"), (DataError("x"), ": x"), (KeyError("bug"), "see the log")]
    for error, detail in errors:
        report = run_checks(health_context(tmp_path), [Check(("one",), partial(broken, error=error), 5.0)])
        assert report.is_fit, error
        assert report.results[0].outcome is CheckOutcome.WARNING, error
        assert detail in report.results[0].detail, error


def test_check_results_are_remembered(tmp_path: Path) -> None:
    seen = []

    def measure(context: HealthContext, history: HealthHistory) -> list[HealthFinding]:
        seen.append(history.samples.get("m", ()))
        return [HealthFinding("m", CheckOutcome.PASSED, "", 1.0, "ms", samples={"m": 1.0})]

    one = health_context(tmp_path, history=history_path(tmp_path, "host/1"))
    for _ in range(3):
        assert run_checks(one, [Check(("m",), measure, 5.0)]).is_fit
    assert seen == [(), (1.0,), (1.0, 1.0)]
    assert read_history(one.history)[0].samples == {"m": (1.0, 1.0, 1.0)}


def test_a_damaged_history_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text("damage")
    report = run_checks(health_context(tmp_path), [Check(("a",), lambda context, history: [failed("a", "bad")], 5.0)])
    assert outcomes(report) == {"a": "failed", "history": "warning"}
    assert "put aside" in report.results[-1].detail


def test_a_history_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def measure(context: HealthContext, history: HealthHistory) -> list[HealthFinding]:
        return [HealthFinding("m", CheckOutcome.PASSED, "", samples={"m": 1.0})]

    one = health_context(tmp_path, history=tmp_path / "file" / "h.json")
    report = run_checks(one, [Check(("m",), measure, 5.0)])
    assert report.is_fit
    assert "cannot be written" in report.results[-1].detail


def test_every_check_reports_although_probes_crash(tmp_path: Path) -> None:
    """The whole list on this machine, with probes that answer at once; the report is sent through etcd."""

    def probe(name, arguments, *, environment, deadline_s):
        return ProbeEnd(-6, "", "last line\n", deadline_s)

    one = health_context(tmp_path, probe=probe)
    report = run_checks(one)
    names = [name for check in CHECKS for name in check.names]
    assert list(outcomes(report)) == names
    assert len(set(names)) == len(names)
    assert decode(CheckReport, encode(report), "report") == report
    # a probe that crashed: neither the disk nor a device is known to work
    assert {name for name, outcome in outcomes(report).items() if outcome == "failed"} == {
        "disk", "matmul", "memory-copy", "loopback",
    }  # fmt: skip
    assert any("its probe was killed by SIGABRT (6): last line" in result.detail for result in report.failed)


def test_context_of_a_configuration(tmp_path: Path) -> None:
    config = load_config(next(iter(sorted((ROOT / "configs").glob("*.toml"))))).config
    one = context_of(config, host="a/b", session="s", run_directory=tmp_path, num_workers=3, etcd=None, places=Places())
    assert one.recovery == config.recovery
    assert one.device == config.runtime.device
    assert one.shared_memory_bytes == 3 * box_bytes(config.telemetry.black_box_records)
    assert one.history.parent.parent == tmp_path / "hosts"  # one name, for any name of the host
