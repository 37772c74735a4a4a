"""Slow host -> verdict -> checkpoint -> evict -> spare -> resume: real trainer, launcher, streamer and daemon.

The daemon judges real step times, so nothing else may run beside these tests. benchmarks/closed_loop.py measures how
long each phase takes, and the speed of the job afterwards.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.contracts.records.host_verdict import Cause, OutcomeKind, VerdictConfidence
from tests.helpers.closed_loop import HOSTS, SPARE, TRAIN, ClosedLoop, closed_loop
from tests.helpers.paced_train import Slowness, StepPace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_STEPS_BEFORE = 30
_VERDICT_WITHIN = 20


def outcome_of(loop: ClosedLoop, verdict_id: str) -> OutcomeKind | None:
    found = loop.outcomes().get(verdict_id)
    return None if found is None else found.kind


def test_a_slow_host_is_named_and_replaced(tmp_path: Path) -> None:
    with closed_loop(tmp_path) as loop:
        loop.wait_for_more_steps(_STEPS_BEFORE)
        assert loop.verdicts() == []
        (slow,) = [part for part in loop.view.rounds()[-1].hosts if part.first_rank == 2]
        loop.pace.slow_down(Slowness("compute", slow.host, 1, factor=1.3))
        slowed_at = loop.newest_step()

        verdict = loop.wait_for_verdict()

        assert verdict.hosts[0] == slow.host
        assert verdict.ranks == (slow.first_rank + 1,)
        assert verdict.cause is Cause.COMPUTE
        assert verdict.last_step is not None
        assert verdict.last_step - slowed_at <= _VERDICT_WITHIN
        incident = loop.view.wait_recovered(0)
        assert incident.culprit_hosts == (slow.host,)
        assert incident.steps_lost == 0
        newest = loop.view.rounds()[-1]
        assert {part.host for part in newest.hosts} == {"host-0", "host-1", SPARE} - {slow.host}
        assert outcome_of(loop, verdict.verdict_id) is OutcomeKind.ACTED
        loop.wait_for_more_steps(_STEPS_BEFORE)


def test_a_slow_link_is_named_and_no_host_is_evicted(tmp_path: Path) -> None:
    """With two hosts on one ring both ends of the link are equally slow: events cannot show which end is the cause."""
    with closed_loop(tmp_path, has_network=True) as loop:
        loop.wait_for_more_steps(_STEPS_BEFORE)
        slow = next(host for host in HOSTS[:2] if host != loop.view.driver())
        assert loop.network is not None
        loop.network.slow_down(HOSTS.index(slow), TRAIN, "12mbit")
        slowed_at = loop.newest_step()

        verdict = loop.wait_for_verdict(VerdictConfidence.LOW)

        assert verdict.cause is Cause.NETWORK
        assert slow in verdict.hosts
        assert verdict.last_step is not None
        assert verdict.last_step - slowed_at <= _VERDICT_WITHIN
        loop.wait_for_more_steps(_VERDICT_WITHIN)
        assert outcome_of(loop, verdict.verdict_id) is OutcomeKind.DECLINED
        assert loop.evictions() == []


@pytest.mark.parametrize(
    ("slowness", "cause"),
    [
        (Slowness("gc", "host-1", 0, factor=2.0), Cause.GC),
        (Slowness("lengths", rank=2), Cause.LENGTHS),
        (Slowness("data", "host-1", 1, factor=1.6), Cause.DATA),
    ],
    ids=["gc storm", "longer sequences", "late data"],
)
def test_slowness_that_is_no_hosts_fault_evicts_no_host(slowness: Slowness, cause: Cause, tmp_path: Path) -> None:
    mask = {"data": {"has_document_mask": True, "prefetch": 0}}
    with closed_loop(tmp_path, mask, pace=StepPace()) as loop:
        loop.wait_for_more_steps(_STEPS_BEFORE)
        assert loop.verdicts() == []
        loop.pace.slow_down(slowness)
        slowed_at = loop.newest_step()

        verdict = loop.wait_for_any_verdict()

        assert verdict.cause is cause
        assert verdict.last_step is not None
        assert verdict.last_step - slowed_at <= _VERDICT_WITHIN
        loop.wait_for_more_steps(_VERDICT_WITHIN)
        assert outcome_of(loop, verdict.verdict_id) is OutcomeKind.DECLINED
        assert loop.evictions() == []
        assert len(loop.view.rounds()) == 1
