"""Rules of an executor: sessions, stop signals, commands, reports, and the checks of its host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.contracts.records.host_records import (
    CheckOutcome,
    CheckReport,
    CheckResult,
    HostPhase,
    HostRecord,
    HostStatus,
    Milestones,
    Stall,
)
from megatrain.contracts.records.rounds import HostCommand, Round, RoundHost
from megatrain_launcher.executor.check_queue import JOIN_CHECK, CheckQueue
from megatrain_launcher.executor.executor_control import StopAction, StopProgress, next_stop_action
from megatrain_launcher.executor.membership import FitnessCheck
from megatrain_launcher.executor.order_state import needs_new_session
from megatrain_launcher.executor.round_follower import CommandTracker
from megatrain_launcher.executor.status_writer import is_news
from tests.helpers.waiting import wait_until

STALL = Stall("step", 7, 6.0, 5.0, 1000.0, (0,))


def a_round(number: int, *hosts: tuple[str, str]) -> Round:
    parts = tuple(RoundHost(host, session, "127.0.0.1", 2 * place, 2) for place, (host, session) in enumerate(hosts))
    return Round(number, 2 * len(parts), parts, "127.0.0.1", 1, "a test", "d", 0.0)


def test_new_session_begins_when_the_job_went_on_without() -> None:
    for named_in, newest, is_needed in [
        (0, None, False),
        (0, a_round(4, ("b", "1")), False),  # a spare that was never used
        (3, a_round(3, ("a", "1")), False),
        (3, a_round(4, ("a", "1")), False),
        (3, a_round(4, ("b", "1")), True),
        (3, a_round(4, ("a", "2")), True),
        (5, a_round(4, ("b", "1")), False),  # an etcd that was restored from a backup: round 5 will be repeated
        (3, None, False),  # etcd lost everything: no host has continued
    ]:
        assert needs_new_session("a", "1", named_in, newest) == is_needed, (named_in, newest, is_needed)


def test_signal_stops_the_job_with_or_without_a_driver() -> None:
    begun, asked = StopProgress(has_trained=True), StopProgress(has_trained=True, asked_at_s=0.0)
    for now_s, stop, is_halted, action in [
        (0.0, begun, False, StopAction.ASK_DRIVER),
        (9.0, asked, False, StopAction.WAIT),
        (11.0, asked, False, StopAction.SAVE_HERE),
        (99.0, asked, True, StopAction.WAIT),
        (99.0, replace(asked, saved_here_at_s=11.0), False, StopAction.WAIT),
    ]:
        assert next_stop_action(now_s, stop, is_training=True, is_halted=is_halted) is action, (now_s, stop)
    idle = replace(asked, idle_since_s=0.0)
    for now_s, stop, action in [
        (0.0, StopProgress(has_trained=False, idle_since_s=0.0), StopAction.LEAVE),
        (19.0, idle, StopAction.WAIT),  # for the job's end, which has the exit code
        (21.0, idle, StopAction.LEAVE),
        (12.0, replace(idle, saved_here_at_s=11.0), StopAction.LEAVE),
    ]:
        assert next_stop_action(now_s, stop, is_training=False, is_halted=False) is action, (now_s, stop)


def test_commands_count_as_completed_in_their_order() -> None:
    tracker = CommandTracker(3)
    assert tracker.completed == 3
    commands = [HostCommand(2, "check"), HostCommand(5, "checkpoint"), HostCommand(4, "check"), HostCommand(6, "dance")]
    assert [command.number for command in tracker.take(commands)] == [4, 5, 6]
    assert (tracker.seen, tracker.completed) == (6, 3)
    tracker.mark_checkpoints_done(5)
    assert tracker.completed == 3  # The previous check is still running.
    tracker.mark_done(4)
    assert tracker.completed == 6
    assert tracker.take(commands) == []


STATUS = HostStatus("a", "1", HostPhase.RUNNING, round=3, alive_ranks="3", min_step=5, max_step=6)


def test_events_are_reported_at_once_steps_periodically() -> None:
    for after, is_worth_it in [
        (STATUS, False),
        (replace(STATUS, min_step=6, last_step_unix_s=5.0, median_step_s=0.1, step_phase="step"), False),
        (replace(STATUS, problem="etcd is slow"), False),
        (replace(STATUS, alive_ranks="1"), True),
        (replace(STATUS, phase=HostPhase.FAILED), True),
        (replace(STATUS, stall=STALL), True),
        (replace(STATUS, milestones=Milestones(1.0)), True),
        (replace(STATUS, session="2"), True),
    ]:
        assert is_news(STATUS, after) == is_worth_it, after
        assert is_news(None, after), after


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
    return CheckQueue(host, host, host.publish, lambda: host.is_training, again_s=0.02)


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
