"""The time for which workers may outlive their host's lease, in tables; the driver always waits longer."""

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
