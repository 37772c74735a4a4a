"""Verdicts of the diagnosis: which are acted on and how, which are declined and why, and which wait for a person."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.contracts.records.host_verdict import Cause, OutcomeKind, VerdictConfidence, VerdictKind
from megatrain.contracts.records.incident import IncidentKind, IncidentState
from megatrain.contracts.records.job_requests import RequestKind
from megatrain_launcher.driver.writes import trims_of
from tests.helpers.driver_story import (
    APPROVAL,
    DRY_RUN,
    ELASTIC,
    POLICY,
    answer,
    begin,
    drive,
    ended,
    go_on,
    go_on_until,
    goes_on,
    halted,
    incidents,
    members,
    stall,
)
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.written_verdicts import STRAGGLER, ask_about, declined, outcome_of, write_verdict


def test_a_slow_host_saves_and_a_spare_takes_its_ranks() -> None:
    job = begin()
    verdict_id = write_verdict(job)
    drive(job)
    (incident,) = incidents(job)
    assert halted(job, 1).is_saving
    assert halted(job, 1).incident == incident.incident_id
    assert (incident.kind, incident.action, incident.culprit_hosts) == (IncidentKind.STRAGGLER, "evict", ("host-2",))
    assert (incident.label, incident.verdict, incident.culprit_ranks) == ("compute", verdict_id, (2,))
    assert incident.evidence == STRAGGLER.evidence
    go_on_until(job, goes_on(job, 2), 2.0)
    go_on(job, 1.0)
    assert members(job, 2) == ["host-0", "host-1"]
    assert KEYS.cordon("host-2") in job.etcd.items
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert (outcome.kind, outcome.incident) == (OutcomeKind.ACTED, incident.incident_id)
    # 999,970 steps to go or a few less, and no restart so far
    assert outcome.gain_s == pytest.approx(0.03 * 999_970, rel=1e-4)
    assert outcome.cost_s == POLICY.restart_cost_s
    assert incidents(job)[0].state is IncidentState.RECOVERED


def test_declined_verdicts_have_a_reason() -> None:
    job = begin()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"confidence": VerdictConfidence.LOW}, "confidence is low"),
        ({"confidence": VerdictConfidence.INSUFFICIENT}, "confidence is insufficient"),
        *(({"cause": cause}, f"cause is {cause}") for cause in Cause if not cause.is_of_host),
        ({"hosts": ()}, "names no host"),
        ({"hosts": ("host-7",)}, "host-7 is not in round 1"),
        ({"hosts": ("host-1",)}, "host-1 is not in round 1"),
        ({"hosts": ("host-0", "host-1", "host-7")}, "host-1 and host-7 are not in round 1"),
        ({"hosts": tuple(f"host-{number}" for number in range(40))}, "names 40 hosts"),
        ({"hosts": ("host-0", "host-2")}, "cannot continue without host-0 and host-2: spare: host-1"),
        ({"gain_s_per_step": 0.0}, "expected more than 0 s"),
        ({"gain_s_per_step": -1.0}, "expected more than 0 s"),
        ({"gain_s_per_step": 0.2}, "expected more than 0 s"),
        ({"round": 0}, "about round 0, but the newest is round 1"),
        ({"round": 2}, "about round 2, but the newest is round 1"),
    ]
    for changes, why in cases:
        assert why in declined(job, **changes), changes
    go_on(job, 1.0)
    assert incidents(job) == []
    assert list(job.rounds()) == [1]


def test_verdict_with_a_wrong_clock_is_carried_out() -> None:
    job = begin()
    write_verdict(job, created_unix_s=1e6)
    go_on_until(job, goes_on(job, 2), 2.0)
    assert members(job, 2) == ["host-0", "host-1"]


def test_a_verdict_of_a_round_that_is_over_is_declined() -> None:
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    drive(job)
    assert "round 1 is over" in declined(job)
    go_on_until(job, goes_on(job, 2), 5.0)
    assert "the newest is round 2" in declined(job)
    # written during another round, although it names this one
    assert [incident.kind for incident in incidents(job)] == [IncidentKind.FAILURE]


def test_verdict_written_before_its_round_is_declined() -> None:
    """Its author guessed the number: it cannot be about that round."""
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    early = ""
    while 2 not in job.rounds():
        job.now += 0.1
        for host in job.hosts.values():
            host.read_log(1000)
            host.act(job.now)
        job.driver.read_log(1000, job.now)
        early = write_verdict(job, round=2)  # The driver receives it together with its own round.
        job.driver.decide(job.now)
    drive(job)
    outcome = outcome_of(job, early)
    assert outcome is not None
    assert outcome.reason == "it was written before round 2 began"


def test_verdict_is_declined_if_it_gains_less_than_it_costs() -> None:
    """The remaining steps times the gain, compared with the cost of a restart."""
    job = begin(replace(POLICY, train_steps=1000, restart_cost_s=30.0))
    # 0.03 s over less than 1000 steps is less than 30 s.
    assert "the gain is less than the cost" in declined(job)
    verdict_id = write_verdict(job, gain_s_per_step=0.04)
    drive(job)
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.ACTED
    assert 30.0 < outcome.gain_s < 40.0


def test_cost_is_that_of_the_jobs_earlier_restarts() -> None:
    job = begin(replace(POLICY, restart_cost_s=1e9))
    assert "the gain is less than the cost" in declined(job)
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    go_on_until(job, goes_on(job, 2), 5.0)
    go_on(job, 1.0)
    (before,) = incidents(job)
    assert before.moments.first_step is not None
    verdict_id = write_verdict(job, round=2)
    drive(job)
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.ACTED
    down_s = before.moments.first_step - before.moments.began
    assert outcome.cost_s == pytest.approx(down_s + (before.steps_lost or 0) * 0.1)


def test_job_without_spare_evicts_only_if_fewer_are_faster() -> None:
    job = begin(replace(ELASTIC, shrink_after_s=1.0), num_hosts=2)
    # One host takes twice as long as two equally fast hosts.
    assert "the gain is less than the cost: on 1 of 2 hosts" in declined(
        job, hosts=("host-1",), step_s=0.13, gain_s_per_step=0.06
    )
    verdict_id = write_verdict(job, hosts=("host-1",), step_s=0.13, gain_s_per_step=0.1)
    go_on_until(job, goes_on(job, 2), 5.0)
    assert members(job, 2) == ["host-0"]
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.ACTED
    # 0.13 - 0.03 * 2 s a step
    assert outcome.gain_s == pytest.approx(0.07 * 999_970, rel=1e-3)


def test_evictions_of_an_hour_are_limited() -> None:
    job = begin(replace(POLICY, evictions_per_hour=1), num_hosts=4)
    write_verdict(job)
    go_on_until(job, goes_on(job, 2), 5.0)
    go_on(job, 1.0)
    second = members(job, 2)[1]
    assert "1 of 1 host were evicted" in declined(job, round=2, hosts=(second,))
    job.now += 3600.0
    go_on(job, 1.0)
    write_verdict(job, round=2, hosts=(second,))
    go_on_until(job, goes_on(job, 3), 5.0)
    assert second not in members(job, 3)


def test_zero_evictions_an_hour_declines_every_verdict() -> None:
    job = begin(replace(POLICY, evictions_per_hour=0))
    assert "diagnostics.evictions_per_hour" in declined(job)


def test_verdicts_wait_while_an_incident_is_open() -> None:
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    go_on_until(job, lambda: 2 in job.rounds(), 5.0)
    verdict_id = write_verdict(job, round=2)
    drive(job)
    assert outcome_of(job, verdict_id) is None
    go_on_until(job, goes_on(job, 3), 5.0)
    # Then it is judged as any other verdict.
    assert [incident.kind for incident in incidents(job)] == [IncidentKind.FAILURE, IncidentKind.STRAGGLER]


def test_duplicate_verdict_is_applied_once() -> None:
    job = begin(APPROVAL)
    first, second = write_verdict(job), write_verdict(job)
    drive(job)
    found = [outcome_of(job, one) for one in (first, second)]
    assert [one.kind for one in found if one is not None] == [OutcomeKind.WAITING, OutcomeKind.DECLINED]
    assert found[1] is not None
    assert found[1].reason == f"verdict {first} has the same content, and is waiting"


def test_dry_run_only_records_its_decision() -> None:
    job = begin(DRY_RUN)
    verdict_id = write_verdict(job)
    drive(job)
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.DRY_RUN
    assert outcome.gain_s > outcome.cost_s
    go_on(job, 2.0)
    assert incidents(job) == []
    assert not [key for key in job.etcd.items if "/cordons/" in key]


def test_an_approved_verdict_is_carried_out() -> None:
    job = begin(APPROVAL)
    verdict_id = write_verdict(job)
    drive(job)
    revision = job.etcd.revision
    drive(job)
    assert job.etcd.revision == revision, "it waits silently"
    request = ask_about(job, RequestKind.APPROVE, verdict_id)
    drive(job)
    reply = answer(job, request)
    assert (reply.is_accepted, reply.is_done) == (True, False)
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert (outcome.kind, outcome.by) == (OutcomeKind.ACTED, "me@here")
    go_on_until(job, goes_on(job, 2), 5.0)
    go_on(job, 1.0)
    assert members(job, 2) == ["host-0", "host-1"]
    assert answer(job, request).is_done
    assert incidents(job)[0].kind is IncidentKind.STRAGGLER


def test_person_may_approve_an_eviction_that_costs_more() -> None:
    job = begin(replace(APPROVAL, train_steps=40, restart_cost_s=0.2))
    verdict_id = write_verdict(job)
    drive(job)
    go_on(job, 5.0)
    ask_about(job, RequestKind.APPROVE, verdict_id)
    drive(job)
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert (outcome.kind, outcome.gain_s) == (OutcomeKind.ACTED, 0.0)


def test_a_dismissed_verdict_is_over_and_stands() -> None:
    job = begin(APPROVAL)
    verdict_id = write_verdict(job)
    drive(job)
    request = ask_about(job, RequestKind.DISMISS, verdict_id)
    drive(job)
    assert answer(job, request).text == f"dismissed {verdict_id}"
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert (outcome.kind, outcome.by) == (OutcomeKind.DECLINED, "me@here")
    assert "has the same content" in declined(job)
    again = ask_about(job, RequestKind.APPROVE, verdict_id)
    drive(job)
    assert not answer(job, again).is_accepted
    assert "is declined by me@here" in answer(job, again).text
    go_on(job, 1.0)
    assert incidents(job) == []


def test_an_approval_that_comes_too_late_is_refused() -> None:
    job = begin(APPROVAL)
    verdict_id = write_verdict(job)
    drive(job)
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    go_on_until(job, goes_on(job, 2), 5.0)
    go_on(job, 0.5)
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DECLINED, "round 1 is over, and it was not approved in time")
    request = ask_about(job, RequestKind.APPROVE, verdict_id)
    drive(job)
    assert not answer(job, request).is_accepted


def test_an_unknown_verdict_cannot_be_approved() -> None:
    job = begin(APPROVAL)
    write_verdict(job, verdict_id="v-7")
    drive(job)
    request = ask_about(job, RequestKind.APPROVE, "v-8")
    drive(job)
    assert not answer(job, request).is_accepted
    assert answer(job, request).text == "no verdict 'v-8'; waiting for a person: v-7"


def test_slow_host_stays_when_the_spare_is_lost() -> None:
    """A slow host is better than none: its cordon is removed if no other host can replace it."""
    job = begin()
    write_verdict(job)
    drive(job)
    spare = job.hosts["host-1"]
    spare.kill()
    spare.lose_lease()
    go_on_until(job, goes_on(job, 2), 20.0)
    assert members(job, 2) == ["host-0", "host-2"]
    assert KEYS.cordon("host-2") not in job.etcd.items


def test_unreadable_verdict_is_declined() -> None:
    job = begin()
    raws = [b"junk", b"{}", b'{"schema_version":1,"verdict_id":"other"}', b"\xff\xfe"]
    for number, raw in enumerate(raws):
        job.etcd.put(KEYS.verdict(f"v-{number}"), raw)
    drive(job)
    for number, raw in enumerate(raws):
        outcome = outcome_of(job, f"v-{number}")
        assert outcome is not None, raw
        assert outcome.kind is OutcomeKind.DECLINED, raw
        assert "cannot be read" in outcome.reason, raw
    drive(job)
    decision = job.driver.decide(job.now)
    assert decision is not None
    assert decision.actions == (), "alarms end, and every outcome is written once"


def test_a_key_that_cannot_be_a_verdict_is_taken_away() -> None:
    job = begin()
    job.etcd.put(KEYS.verdict("a/b"), b"{}")
    drive(job)
    assert KEYS.verdict("a/b") not in job.etcd.items
    assert outcome_of(job, "a/b") is None


def test_verdict_on_a_hang_is_evidence_of_its_incident() -> None:
    job = begin()
    verdict_id = write_verdict(job, kind=VerdictKind.HANG, evidence=("rank 2 never entered collective 7",))
    drive(job)
    assert outcome_of(job, verdict_id) is None
    stall(job, "host-0", "host-2")
    go_on_until(job, lambda: outcome_of(job, verdict_id) is not None, 30.0)
    (incident,) = incidents(job)
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert (outcome.kind, outcome.incident) == (OutcomeKind.ACTED, incident.incident_id)
    assert "rank 2 never entered collective 7" in incident.evidence
    assert incident.verdict == verdict_id


def test_second_verdict_on_a_hang_is_declined_with_the_first() -> None:
    job = begin()
    first = write_verdict(job, kind=VerdictKind.HANG, hosts=("host-0", "host-1"))
    drive(job)
    second = write_verdict(job, kind=VerdictKind.HANG, hosts=("host-0",))
    stall(job, "host-0", "host-2")
    go_on_until(job, lambda: outcome_of(job, second) is not None, 30.0)
    (incident,) = incidents(job)
    found = {verdict_id: outcome_of(job, verdict_id) for verdict_id in (first, second)}
    assert {verdict_id: one and one.kind for verdict_id, one in found.items()} == {
        first: OutcomeKind.ACTED,
        second: OutcomeKind.DECLINED,
    }
    assert incident.verdict == first
    second_outcome = found[second]
    assert second_outcome is not None
    assert f"{incident.incident_id} has the evidence of verdict {first}" in second_outcome.reason


def test_hang_verdict_without_a_hang_is_declined_later() -> None:
    job = begin()
    verdict_id = write_verdict(job, kind=VerdictKind.HANG)
    go_on(job, 59.0, step_s=1.0)
    assert outcome_of(job, verdict_id) is None
    go_on(job, 2.0, step_s=1.0)
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.DECLINED
    assert list(job.rounds()) == [1]


def test_verdicts_of_a_job_that_is_over_are_answered() -> None:
    job = begin(APPROVAL)
    waiting = write_verdict(job)
    drive(job)
    job.hosts["host-0"].fail(job.now, is_cascade=False, exit_code=78)
    go_on_until(job, lambda: ended(job) is not None, 5.0)
    late = write_verdict(job)
    drive(job)
    for verdict_id in (waiting, late):
        outcome = outcome_of(job, verdict_id)
        assert outcome is not None
        assert outcome.kind is OutcomeKind.DECLINED


def test_a_flood_is_answered_in_turns_and_kept_bounded() -> None:
    job = begin()
    names = [write_verdict(job, cause=Cause.GC) for _ in range(150)]
    for _ in range(5):
        drive(job)
    assert all(outcome_of(job, name) is not None for name in names)
    assert job.driver.state is not None
    trims = trims_of(KEYS, job.driver.state.seen, num_verdicts=140)
    gone = [trim.keys.start.decode() for trim in trims]
    # Each verdict is recorded before its outcome: alone it would be judged again.
    assert gone == [key for name in names[:10] for key in (KEYS.verdict(name), KEYS.outcome(name))]
    job.etcd.delete([KEYS.verdict(names[20])])
    drive(job)
    assert job.driver.state is not None
    trims = trims_of(KEYS, job.driver.state.seen, num_verdicts=500)
    assert [trim.keys.start.decode() for trim in trims] == [KEYS.outcome(names[20])]
