"""The checks of an executor's host: before it takes part, on request, and repeatedly while it is not fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult, HostRecord
from megatrain_launcher.executor.check_queue import JOIN_CHECK, CheckQueue, CheckQueueParts
from megatrain_launcher.executor.membership import FitnessCheck
from tests.helpers.waiting import wait_until

RECORD = HostRecord("a", "1", 1, "a", 1, 1, 1, "", "", "", 0.0, is_fit=False, unfit_reason="its checks are running")


@dataclass
class Host:
    """A host whose disk is full until a test changes it."""

    record: HostRecord = RECORD
    is_full: bool = True
    is_training: bool = False
    num_checks: int = 0
    num_reads: int = 0
    """The number of queries of its fitness."""
    reports: list[str] = field(default_factory=list)

    @property
    def session(self) -> str:
        return self.record.session

    def set_unfit_reason(self, check: FitnessCheck, reason: str) -> bool:
        assert check is FitnessCheck.HEALTH
        is_news = reason != self.record.unfit_reason
        self.record = replace(self.record, is_fit=not reason, unfit_reason=reason)
        return is_news

    def unfit_reason(self, check: FitnessCheck) -> str:
        assert check is FitnessCheck.HEALTH
        self.num_reads += 1
        return self.record.unfit_reason

    def check(self, session: str, is_training: bool) -> CheckReport:
        self.num_checks += 1
        outcome = CheckOutcome.FAILED if self.is_full else CheckOutcome.PASSED
        return CheckReport("a", session, 0.0, (CheckResult("disk", outcome, "full", 0.0),))

    def publish(self, check_id: str, _report: CheckReport) -> None:
        self.reports.append(check_id)


def queue_of(host: Any) -> CheckQueue:
    return CheckQueue(CheckQueueParts(host, host, host.publish, lambda: host.is_training), again_s=0.02)


def test_a_host_that_is_not_fit_is_checked_again_until_it_is() -> None:
    host = Host()
    check_queue = queue_of(host)
    check_queue.check_before_joining()
    wait_until(lambda: host.num_checks >= 3, "some checks")
    assert host.record.unfit_reason == "disk: full"
    host.is_full = False
    wait_until(lambda: host.record.is_fit, "the host to be fit")
    reported, reads = host.num_checks, host.num_reads
    wait_until(lambda: host.num_reads >= reads + 3, "further queries of its fitness")
    assert host.num_checks == reported, "a fit host is not checked again"
    assert set(host.reports) == {JOIN_CHECK}
    check_queue.close()


def test_training_host_is_not_checked() -> None:
    host = Host(is_training=True)
    check_queue = queue_of(host)
    wait_until(lambda: host.num_reads >= 3, "further queries of its fitness")
    assert host.num_checks == 0
    host.is_training = False
    wait_until(lambda: host.num_checks > 0, "a check")
    check_queue.close()
