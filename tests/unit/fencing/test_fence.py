"""The time for which workers may outlive their host's lease, and for which a phase may last, in tables."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from megatrain.contracts.black_box.values import Phase, Progress
from megatrain.fencing.fence import (
    CLOCK_RATE,
    REACTION_S,
    FenceAction,
    FenceRule,
    LeaseView,
    StepSilence,
    StopTimes,
    fence,
    interval_of,
    step_silence,
    stop_times,
)
from megatrain.fencing.phase_timeouts import PhaseTimeouts, find_stall

S = 1_000_000_000
RULE = FenceRule(lease_ttl_s=10.0, floor_s=5.0, join_timeout_s=600.0, save_grace_s=60.0)
LIMITS = RULE.deadlines(0.0)
PROGRESS = Progress(
    phase=Phase.STEP, phase_since_ns=0, current_step=7, step_started_ns=None, completed_step=6, completed_ns=40 * S,
    last_step_ns=None, median_step_ns=None, completed_command=0, num_lost_ends=0,
)  # fmt: skip


DEADLINES = [
    (0.0, 5.0, 475.0, 540.0),  # the minimum; and nine tenths of recovery.join_timeout_s
    (0.1, 5.0, 475.0, 540.0),
    (5.0, 15.0, 475.0, 540.0),
    (60.0, 180.0, 475.0, 540.0),
    (600.0, 1800.0, 3600.0, 3665.0),  # Two silence limits and a save take longer than the wait for hosts.
]
"""Interval, and the limits of silence, save and end: seconds."""


def test_deadlines_follow_from_the_interval() -> None:
    for interval_s, silent_s, save_s, end_s in DEADLINES:
        limits = RULE.deadlines(interval_s)
        found = (limits.start_s, limits.silent_s, limits.save_s, limits.end_s)
        assert found == (30.0, silent_s, save_s, end_s), interval_s


DECISIONS = [
    (-1.0, StepSilence(900.0), FenceAction.GO_ON, ""),  # The driver will handle it.
    (0.0, StepSilence(900.0), FenceAction.GO_ON, ""),
    (400.0, StepSilence(0.1), FenceAction.GO_ON, ""),  # Completed steps count, whatever the state of etcd.
    (0.1, StepSilence(5.1), FenceAction.STOP, "no step was completed for 5.1 s (limit 5.0 s)"),
    (29.0, StepSilence(None), FenceAction.GO_ON, ""),
    (31.0, StepSilence(None), FenceAction.STOP, "no step of this round was completed (limit 30.0 s)"),
    (400.0, StepSilence(None, is_ending=True), FenceAction.GO_ON, ""),
    (476.0, StepSilence(0.1), FenceAction.SAVE, "its workers save and stop"),
    (476.0, StepSilence(None, is_ending=True), FenceAction.SAVE, "its workers save and stop"),
    (541.0, StepSilence(0.1), FenceAction.STOP, "it has held no lease for 541.0 s (limit 540.0 s)"),
]
"""Seconds without a lease, the silence of the ranks, the action and its reason."""


def test_decisions_of_a_host_without_a_lease() -> None:
    for gone_s, silence, action, text in DECISIONS:
        found, reason = fence(LIMITS, LeaseView(gone_s), silence)
        assert found is action, (gone_s, silence)
        assert text in reason, (gone_s, silence)
        assert bool(reason) == (action is not FenceAction.GO_ON)


def test_host_with_a_lease_but_without_orders_names_the_orders() -> None:
    action, reason = fence(LIMITS, LeaseView(31.0, has_lost_orders=True), StepSilence(None))
    assert action is FenceAction.STOP
    assert "its orders do not arrive, and for 31.0 s that counts as no lease" in reason


def test_silence_of_a_host_is_that_of_its_slowest_rank() -> None:
    stopping = replace(PROGRESS, phase=Phase.STOPPING)
    cases: list[tuple[dict[int, Progress], StepSilence]] = [
        ({}, StepSilence(None)),
        ({0: PROGRESS}, StepSilence(10.0)),
        ({0: PROGRESS, 1: replace(PROGRESS, completed_ns=30 * S)}, StepSilence(20.0)),
        ({0: PROGRESS, 1: replace(PROGRESS, completed_ns=None)}, StepSilence(None)),
        ({0: stopping}, StepSilence(None, is_ending=True)),
        ({0: stopping, 1: PROGRESS}, StepSilence(10.0)),
    ]
    for ranks, silence in cases:
        assert step_silence(ranks, 50 * S) == silence, ranks


def test_the_interval_of_a_rank() -> None:
    cases: list[tuple[dict[str, int], float | None]] = [
        ({}, None),
        ({"last_step_ns": 3 * S}, 3.0),  # The first step is used as the median.
        ({"last_step_ns": 3 * S, "median_step_ns": S}, 1.0),
        ({"median_step_ns": S, "longest_checkpoint_ns": S // 2}, 1.0),
        ({"median_step_ns": S, "longest_checkpoint_ns": 4 * S, "longest_evaluation_ns": 5 * S}, 5.0),
    ]
    for changed, interval_s in cases:
        assert interval_of(replace(PROGRESS, **changed)) == interval_s, changed


def test_longer_interval_is_reported_where_a_deadline_changes() -> None:
    raised = {(0.0, 0.1): None, (0.0, 2.0): 2.5, (2.5, 2.4): None, (2.5, 2.6): 3.25, (0.0, 600.0): 750.0}
    assert {
        (published_s, seen_s): RULE.interval_to_publish(published_s, seen_s) for published_s, seen_s in raised
    } == raised


SECONDS = st.floats(0.1, 600.0)
RATES = st.floats(0.9951, 1.0049)


TIMES = {
    "step_s": SECONDS, "lag": st.floats(0.0, 1.0), "stuck_ago_s": st.floats(-1000.0, 1000.0),
    "host": RATES, "driver": RATES, "ttl_s": st.floats(2.0, 60.0), "grace_s": st.floats(0.1, 600.0),
    "join_s": st.floats(1.0, 5000.0), "stop_s": st.floats(0.0, 900.0),
}  # fmt: skip


@example(
    step_s=1.0, lag=0.0, stuck_ago_s=0.0, host=0.9951, driver=1.0, ttl_s=17.0, grace_s=1.0, join_s=1.0, stop_s=0.0
)  # fmt: skip
@given(**TIMES)
@settings(max_examples=20)
def test_workers_of_a_running_host_end_before_the_driver_goes_on(**times: float) -> None:
    check_workers_end_before_the_driver_goes_on(**times)


@pytest.mark.slow
@given(**TIMES)
@settings(max_examples=300)
def test_workers_end_before_the_driver_goes_on_at_more_times(**times: float) -> None:
    check_workers_end_before_the_driver_goes_on(**times)


def check_workers_end_before_the_driver_goes_on(
    step_s: float, lag: float, stuck_ago_s: float, host: float, driver: float, ttl_s: float, grace_s: float,
    join_s: float, stop_s: float,
) -> None:  # fmt: skip
    """Real time 0 is the end of the lease in etcd; the other hosts are stuck in a step that this host still
    completes."""
    rule = FenceRule(lease_ttl_s=ttl_s, floor_s=5.0, join_timeout_s=join_s, save_grace_s=grace_s)
    published_s = rule.interval_to_publish(0.0, step_s) or 0.0
    published_stop_s = rule.stop_to_publish(0.0, stop_s) or 0.0
    limits = rule.deadlines(published_s, published_stop_s)
    stuck = -stuck_ago_s
    completed = stuck + (1.0 + lag) * step_s  # its last step, in real time
    # By its own clock the lease has ended, at the latest, when etcd's TTL is over by a slower clock.
    lease_over = max(0.0, ttl_s * (1 / host - 1))
    stopped = min(max(lease_over, completed + limits.silent_s / host), lease_over + limits.end_s / host)
    waited_until = rule.workers_gone_at(
        lease_gone_at=0.0, stuck_since=driver * stuck, published_s=published_s, seen_s=step_s, has_stepped=True,
        published_stop_s=published_stop_s,
    )  # fmt: skip
    if stuck >= 0:
        assert waited_until / driver >= stopped + REACTION_S - 1e-6
    alone = rule.workers_gone_at(
        lease_gone_at=0.0, stuck_since=None, published_s=published_s, seen_s=step_s, has_stepped=True,
        published_stop_s=published_stop_s,
    )  # fmt: skip
    assert alone / driver >= lease_over + limits.end_s / host + REACTION_S - 1e-6
    assert waited_until <= alone + 1.0
    # not longer than the slowest clock of the host requires
    assert alone <= (CLOCK_RATE - 1.0) * ttl_s + CLOCK_RATE * (limits.end_s + REACTION_S) + 1e-6


def test_a_longer_stop_is_reported_where_the_grace_is_short() -> None:
    raised = {
        (0.0, 0.5): None,
        (0.0, 40.0): None,  # runtime.save_grace_s=60 leaves half of that in addition
        (0.0, 41.0): 82.0,
        (82.0, 54.0): None,
        (82.0, 55.0): 110.0,
    }
    assert {
        (published_s, seen_s): RULE.stop_to_publish(published_s, seen_s) for published_s, seen_s in raised
    } == raised


def test_save_without_a_lease_gets_the_measured_stop_time() -> None:
    for stop_s, save_s, end_s in ((0.0, 475.0, 540.0), (110.0, 425.0, 540.0), (600.0, 10.0, 615.0)):
        limits = RULE.deadlines(0.0, stop_s)
        assert (limits.save_s, limits.end_s) == (save_s, end_s), stop_s
        assert limits.end_s - limits.save_s == RULE.grace_s(stop_s) + 5.0


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({}, None),
        ({"last_step_ns": 3 * S}, (3.0, 0.0, 0.0, 0.0)),
        (
            {
                "last_step_ns": 3 * S, "median_step_ns": 2 * S, "longest_evaluation_ns": 5 * S,
                "longest_checkpoint_ns": S, "longest_write_ns": 8 * S,
            },
            (2.0, 5.0, 1.0, 8.0),
        ),
    ],
)  # fmt: skip
def test_stop_time_of_a_rank(changed: dict[str, int], parts: tuple[float, ...] | None) -> None:
    found = stop_times(replace(PROGRESS, **changed))
    assert found == (None if parts is None else StopTimes(*parts))
    assert found is None or found.total_s == sum(parts or ())


PHASE_TIMEOUTS = PhaseTimeouts(init_s=300, first_step_s=600, checkpoint_s=400, evaluation_s=500, floor_s=5, factor=10)


def progress(
    phase: Phase = Phase.STEP, *, median_s: float | None = 0.1, last_s: float | None = 0.1, since_s: float = 0
) -> Progress:
    """Return the progress of a rank that entered its phase and has done nothing since."""

    def ns(seconds: float | None) -> int | None:
        return None if seconds is None else int(seconds * S)

    return Progress(
        phase=phase,
        phase_since_ns=int(since_s * S),
        current_step=7,
        step_started_ns=None,
        completed_step=6,
        completed_ns=None,
        last_step_ns=ns(last_s),
        median_step_ns=ns(median_s),
        completed_command=0,
        num_lost_ends=0,
    )


PHASE_LIMITS = [
    (progress(), 5.0),  # Ten times 0.1 s is below the minimum.
    (progress(median_s=2.0), 20.0),
    (progress(median_s=None, last_s=3.0), 30.0),  # The first step is used as the median.
    (progress(median_s=None, last_s=90.0), 600.0),  # No step may take longer than the first one may.
    (progress(median_s=None, last_s=None), 600.0),
    (progress(Phase.INIT), 300.0),
    (progress(Phase.FIRST_STEP), 600.0),
    (progress(Phase.CHECKPOINT), 400.0),
    (progress(Phase.EVALUATION), 500.0),
    (progress(Phase.STOPPING), 400.0),
]


def test_each_phase_has_its_own_limit() -> None:
    for state, limit_s in PHASE_LIMITS:
        assert PHASE_TIMEOUTS.limit_s(state) == limit_s, state
        assert find_stall({3: state}, PHASE_TIMEOUTS, int((limit_s - 0.01) * S), 1000.0) is None, state
        stall = find_stall({3: state}, PHASE_TIMEOUTS, int((limit_s + 0.01) * S), 1000.0)
        assert stall is not None, state
        assert (stall.ranks, stall.limit_s, stall.step, stall.at_unix_s) == ((3,), limit_s, 7, 1000.0)
        assert stall.phase == state.phase.name.lower().replace("_", "-")


def test_a_new_phase_a_begun_and_a_completed_step_are_progress() -> None:
    for field in ("phase_since_ns", "step_started_ns", "completed_ns"):
        state = replace(progress(), **{field: 50 * S})
        assert find_stall({0: state}, PHASE_TIMEOUTS, 54 * S, 0.0) is None, field
        assert find_stall({0: state}, PHASE_TIMEOUTS, 56 * S, 0.0) is not None, field


def test_stall_names_all_late_ranks_and_describes_the_longest() -> None:
    ranks = {4: progress(since_s=3), 5: progress(since_s=1), 6: progress(since_s=9.5), 7: progress(Phase.CHECKPOINT)}
    stall = find_stall(ranks, PHASE_TIMEOUTS, 10 * S, 0.0)
    assert stall is not None
    assert (stall.ranks, stall.silent_s) == ((4, 5), 9.0)


MEASURED = [
    (Phase.CHECKPOINT, 0.02, 5.0),  # Ten times that is below the minimum.
    (Phase.CHECKPOINT, 3.0, 30.0),
    (Phase.CHECKPOINT, 90.0, 400.0),  # never longer than configured
    (Phase.EVALUATION, 2.0, 20.0),
    (Phase.STOPPING, 0.02, 400.0),  # The last wait for storage differs from all earlier ones.
    (Phase.STEP, 90.0, 5.0),
]
"""Phase, the longest earlier duration, limit."""


def test_limit_of_a_repeated_phase_follows_from_its_longest() -> None:
    for phase, longest_s, limit_s in MEASURED:
        longest_ns = int(longest_s * S)
        state = replace(progress(phase), longest_checkpoint_ns=longest_ns, longest_evaluation_ns=longest_ns)
        assert PHASE_TIMEOUTS.limit_s(state) == limit_s, (phase, longest_s)
