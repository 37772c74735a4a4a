"""The status that a host reports: its phase follows from its workers, the halts and the orders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.contracts.records.host_records import HostPhase, HostStatus, Milestones, Stall
from megatrain.contracts.records.rounds import Round, RoundHost
from megatrain_job.failures.verdict import FailureAction, Label, Verdict
from megatrain_launcher.executor.host_status_builder import HostStatusBuilder
from megatrain_launcher.executor.order_state import OrdersView
from megatrain_launcher.executor.progress import HostProgress
from megatrain_launcher.interfaces import Assignment, WorkerEnd

PART = RoundHost("a", "1", "127.0.0.1", 4, 2)
ASSIGNMENT = Assignment(Round(3, 8, (PART,), "127.0.0.1", 1, "a test", "d", 0.0), PART)
ORDERS = OrdersView(taken_round=3, newest=ASSIGNMENT.round, newest_halt=2, named_in=3, end=None)
IDLE = replace(ORDERS, taken_round=0)
HALTED = replace(ORDERS, newest_halt=3)
STALL = Stall("step", 7, 6.0, 5.0, 1000.0, (4,))
NETWORK = Verdict(
    Label.NETWORK, FailureAction.TOLERATE_THEN_EVICT, True, "peer 10.0.0.7", line="Connection reset by peer"
)
USER = Verdict(Label.USER_CODE, FailureAction.STOP_USER, False, None, line="RuntimeError: boom")


def end(local_rank: int, exit_code: int, at: float = 10.0, verdict: Verdict | None = None) -> WorkerEnd:
    line = "" if verdict is None else verdict.line
    return WorkerEnd(local_rank, 4 + local_rank, 100 + local_rank, exit_code, at, verdict, line)


@pytest.fixture
def state() -> HostStatusBuilder:
    return HostStatusBuilder("a")


@pytest.fixture
def say(state: HostStatusBuilder) -> Callable[..., HostStatus]:
    def build(orders: OrdersView = ORDERS) -> HostStatus:
        return state.status("1", orders, "")

    return build


def start(state: HostStatusBuilder) -> None:
    state.workers_started(ASSIGNMENT, {0: 100, 1: 101})


def test_phase_of_a_host_without_workers(say: Callable[..., HostStatus]) -> None:
    for orders, phase, number in [
        (OrdersView(0, None, 0, 0, None), HostPhase.PARKED, 0),
        (replace(IDLE, newest_halt=3, named_in=0), HostPhase.PARKED, 3),  # a spare
        (replace(IDLE, newest_halt=3), HostPhase.STOPPED, 3),  # named, and halted before it could start
        (IDLE, HostPhase.PARKED, 2),  # named by round 3, which it has not started
        (ORDERS, HostPhase.STARTING, 3),
    ]:
        found = say(orders)
        assert (found.phase, found.round, found.alive_ranks, found.failures) == (phase, number, "", ()), phase


def test_round_has_failed_until_the_next_one_starts(state: HostStatusBuilder) -> None:
    assert state.failed_round() == 0
    start(state)
    state.worker_ended(ASSIGNMENT, end(0, 75))
    assert state.failed_round() == 0, "a worker that saved and stopped has not failed"
    state.worker_ended(ASSIGNMENT, end(1, 69))
    state.workers_stopped(ASSIGNMENT)
    assert state.failed_round() == 3
    start(state)
    assert state.failed_round() == 0


def test_status_from_the_start_to_the_end_of_workers(state: HostStatusBuilder, say: Callable[..., HostStatus]) -> None:
    start(state)
    found = say()
    assert (found.phase, found.round, found.alive_ranks) == (HostPhase.STARTING, 3, "3")
    assert found.milestones.started_unix_s is not None
    milestones = Milestones(1.0, 2.0, 3.0, 4.0)
    state.set_progress(2, HostProgress(Milestones(), min_step=99))  # of another round
    state.set_progress(3, HostProgress(milestones, 5, 6, 4, 9.0, 0.1, "step", has_stepped=True))
    found = say()
    assert (found.phase, found.min_step, found.max_step, found.resumed_step) == (HostPhase.RUNNING, 5, 6, 4)
    assert (found.milestones, found.median_step_s, found.step_phase) == (milestones, 0.1, "step")
    state.worker_ended(ASSIGNMENT, end(0, 0))
    found = say()
    assert (found.phase, found.alive_ranks, found.exit_code) == (HostPhase.RUNNING, "2", None)
    state.worker_ended(ASSIGNMENT, end(1, 75))
    state.workers_stopping(ASSIGNMENT)
    state.workers_stopped(ASSIGNMENT)
    for orders in (ORDERS, IDLE, HALTED):
        found = say(orders)
        assert (found.phase, found.round, found.exit_code, found.alive_ranks) == (HostPhase.DONE, 3, 75, "")
    assert not state.is_broken(3)


def test_a_failure_is_reported_with_its_log_line(state: HostStatusBuilder, say: Callable[..., HostStatus]) -> None:
    start(state)
    state.worker_ended(ASSIGNMENT, end(1, 69, at=11.0, verdict=NETWORK))
    found = say()
    assert (found.phase, found.alive_ranks, found.lost_hosts) == (HostPhase.FAILED, "1", ("10.0.0.7",))
    assert found.last_error == "Connection reset by peer"
    state.worker_ended(ASSIGNMENT, end(0, 1, at=10.5))
    state.worker_ended(ASSIGNMENT, end(0, 1, at=10.5, verdict=USER))  # its log has been read
    found = say()
    assert [(failure.rank, failure.label) for failure in found.failures] == [(4, "user_code"), (5, "network")]
    assert found.last_error == "RuntimeError: boom"
    state.workers_stopping(ASSIGNMENT)
    assert say().phase is HostPhase.FAILED
    state.workers_stopped(ASSIGNMENT)
    assert (say().phase, say().alive_ranks) == (HostPhase.FAILED, "")
    assert say(HALTED).phase is HostPhase.STOPPED
    assert say(HALTED).failures == found.failures
    assert state.is_broken(3)


def test_a_halt_stops_workers(state: HostStatusBuilder, say: Callable[..., HostStatus]) -> None:
    start(state)
    state.workers_stopping(ASSIGNMENT)
    assert (say(HALTED).phase, say(HALTED).alive_ranks) == (HostPhase.STOPPING, "3")
    assert state.running() is None
    state.workers_stopped(ASSIGNMENT)
    assert (say(HALTED).phase, say(HALTED).alive_ranks) == (HostPhase.STOPPED, "")
    later = say(replace(IDLE, newest_halt=4))
    assert (later.phase, later.round) == (HostPhase.PARKED, 4)


def test_a_host_that_fenced_itself_failed(state: HostStatusBuilder, say: Callable[..., HostStatus]) -> None:
    start(state)
    state.set_fenced(3, "fenced")
    # They may be saving: STOPPING is the phase of a host that has killed its workers.
    assert (say().phase, say().last_error) == (HostPhase.STARTING, "fenced")
    state.workers_stopping(ASSIGNMENT)
    assert say().phase is HostPhase.STOPPING
    state.workers_stopped(ASSIGNMENT)
    assert (say(IDLE).phase, say(IDLE).last_error) == (HostPhase.FAILED, "fenced")
    state.begin_session()
    assert say(replace(IDLE, newest_halt=3, named_in=0)).phase is HostPhase.PARKED


def test_last_step_counts_although_it_was_not_polled(state: HostStatusBuilder, say: Callable[..., HostStatus]) -> None:
    start(state)
    milestones = Milestones(1.0, 2.0, 3.0, 4.0)
    state.set_progress(3, HostProgress(milestones, 12, 12, 4, 9.0, 0.1, "step", has_stepped=True))
    state.worker_ended(ASSIGNMENT, end(0, -9))
    state.set_last_steps(2, HostProgress(Milestones(), 99, 99))  # of another round
    state.set_last_steps(3, HostProgress(Milestones(), 13, 14, 7))
    state.set_progress(3, HostProgress(milestones, 12, 13, 4, 9.0, 0.1, "step", has_stepped=True))  # an earlier poll
    state.workers_stopped(ASSIGNMENT)
    found = say()
    assert (found.min_step, found.max_step, found.resumed_step, found.milestones) == (13, 14, 4, milestones)


def test_workers_that_could_not_be_started_are_a_failure(
    state: HostStatusBuilder, say: Callable[..., HostStatus]
) -> None:
    state.worker_ended(ASSIGNMENT, end(0, 1))
    assert (say().phase, say().alive_ranks, len(say().failures)) == (HostPhase.FAILED, "", 1)


def test_stall_is_that_of_the_current_round(state: HostStatusBuilder, say: Callable[..., HostStatus]) -> None:
    start(state)
    for number, stall, shown in ((3, STALL, STALL), (4, None, STALL), (3, None, None), (4, STALL, None)):
        state.set_stall(number, stall)
        assert say().stall == shown


def test_milestones_are_published_at_once_and_steps_later() -> None:
    reported: list[int] = []
    state = HostStatusBuilder("a", lambda: reported.append(1))
    start(state)
    before = len(reported)
    state.set_progress(3, HostProgress(Milestones(1.0, 2.0)))
    state.set_progress(3, HostProgress(Milestones(1.0, 2.0), max_step=4))
    assert len(reported) == before + 1
    state.set_progress(3, HostProgress(Milestones(1.0, 2.0, 3.0, 4.0), 5, 5, has_stepped=True))
    assert len(reported) == before + 2


def test_log_line_of_a_living_rank_is_shown_until_a_failure(
    state: HostStatusBuilder, say: Callable[..., HostStatus]
) -> None:
    start(state)
    state.set_alarm(3, 5, USER)
    assert say().last_error == "rank 5: RuntimeError: boom"
