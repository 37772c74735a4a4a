"""Verdicts of the diagnosis: which are acted on and how, which are declined and why, and which wait for a person."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.contracts.records.host_verdict import Cause, OutcomeKind, VerdictConfidence, VerdictKind
from megatrain.contracts.records.incident import IncidentKind, IncidentState
from megatrain.contracts.records.job_requests import RequestKind
from megatrain_launcher.driver.writes import trims_of
from tests.helpers.driver_story import APPROVAL, DRY_RUN, ELASTIC, POLICY, begin
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.written_verdicts import STRAGGLER


def test_a_slow_host_saves_and_a_spare_takes_its_ranks() -> None:
    job = begin()
    verdict_id = job.write_verdict()
    job.drive()
    (incident,) = job.incidents()
    assert job.halted(1).is_saving
    assert job.halted(1).incident == incident.incident_id
    assert (incident.kind, incident.action, incident.culprit_hosts) == (IncidentKind.STRAGGLER, "evict", ("host-2",))
    assert (incident.label, incident.verdict, incident.culprit_ranks) == ("compute", verdict_id, (2,))
    assert incident.evidence == STRAGGLER.evidence
    job.go_on_until(job.goes_on(2), 2.0)
    job.go_on(1.0)
    assert job.members(2) == ["host-0", "host-1"]
    assert KEYS.cordon("host-2") in job.etcd.items
    outcome = job.outcome(verdict_id)
    assert (outcome.kind, outcome.incident) == (OutcomeKind.ACTED, incident.incident_id)
    # 999,970 steps to go or a few less, and no restart so far
    assert outcome.gain_s == pytest.approx(0.03 * 999_970, rel=1e-4)
    assert outcome.cost_s == POLICY.restart_cost_s
    assert job.incidents()[0].state is IncidentState.RECOVERED


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
        assert why in job.declined(**changes), changes
    job.go_on(1.0)
    assert job.incidents() == []
    assert list(job.rounds()) == [1]


def test_verdict_with_a_wrong_clock_is_carried_out() -> None:
    job = begin()
    job.write_verdict(created_unix_s=1e6)
    job.go_on_until(job.goes_on(2), 2.0)
    assert job.members(2) == ["host-0", "host-1"]


def test_a_verdict_of_a_round_that_is_over_is_declined() -> None:
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.drive()
    assert "round 1 is over" in job.declined()
    job.go_on_until(job.goes_on(2), 5.0)
    assert "the newest is round 2" in job.declined()
    # written during another round, although it names this one
    assert [incident.kind for incident in job.incidents()] == [IncidentKind.FAILURE]


def test_verdict_written_before_its_round_is_declined() -> None:
    """Its author guessed the number: it cannot be about that round."""
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    early = ""
    while 2 not in job.rounds():
        job.now += 0.1
        job.obey()
        job.driver.read_log(1000, job.now)
        early = job.write_verdict(round=2)  # The driver receives it together with its own round.
        job.driver.decide(job.now)
    job.drive()
    assert job.outcome(early).reason == "it was written before round 2 began"


def test_verdict_is_declined_if_it_gains_less_than_it_costs() -> None:
    """The remaining steps times the gain, compared with the cost of a restart."""
    job = begin(replace(POLICY, train_steps=1000, restart_cost_s=30.0))
    # 0.03 s over less than 1000 steps is less than 30 s.
    assert "the gain is less than the cost" in job.declined()
    verdict_id = job.write_verdict(gain_s_per_step=0.04)
    job.drive()
    outcome = job.outcome(verdict_id)
    assert outcome.kind is OutcomeKind.ACTED
    assert 30.0 < outcome.gain_s < 40.0


def test_cost_is_that_of_the_jobs_earlier_restarts() -> None:
    job = begin(replace(POLICY, restart_cost_s=1e9))
    assert "the gain is less than the cost" in job.declined()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.go_on_until(job.goes_on(2), 5.0)
    job.go_on(1.0)
    (before,) = job.incidents()
    assert before.moments.first_step is not None
    verdict_id = job.write_verdict(round=2)
    job.drive()
    outcome = job.outcome(verdict_id)
    assert outcome.kind is OutcomeKind.ACTED
    down_s = before.moments.first_step - before.moments.began
    assert outcome.cost_s == pytest.approx(down_s + (before.steps_lost or 0) * 0.1)


def test_job_without_spare_evicts_only_if_fewer_are_faster() -> None:
    job = begin(replace(ELASTIC, shrink_after_s=1.0), num_hosts=2)
    # One host takes twice as long as two equally fast hosts.
    assert "the gain is less than the cost: on 1 of 2 hosts" in job.declined(
        hosts=("host-1",), step_s=0.13, gain_s_per_step=0.06
    )
    verdict_id = job.write_verdict(hosts=("host-1",), step_s=0.13, gain_s_per_step=0.1)
    job.go_on_until(job.goes_on(2), 5.0)
    assert job.members(2) == ["host-0"]
    outcome = job.outcome(verdict_id)
    assert outcome.kind is OutcomeKind.ACTED
    # 0.13 - 0.03 * 2 s a step
    assert outcome.gain_s == pytest.approx(0.07 * 999_970, rel=1e-3)


def test_evictions_of_an_hour_are_limited() -> None:
    job = begin(replace(POLICY, evictions_per_hour=1), num_hosts=4)
    job.write_verdict()
    job.go_on_until(job.goes_on(2), 5.0)
    job.go_on(1.0)
    second = job.members(2)[1]
    assert "2 hosts would be evicted as stragglers within an hour" in job.declined(round=2, hosts=(second,))
    job.now += 3600.0
    job.go_on(1.0)
    job.write_verdict(round=2, hosts=(second,))
    job.go_on_until(job.goes_on(3), 5.0)
    assert second not in job.members(3)


def test_zero_evictions_an_hour_declines_every_verdict() -> None:
    job = begin(replace(POLICY, evictions_per_hour=0))
    assert "diagnostics.evictions_per_hour" in job.declined()


def test_verdicts_wait_while_an_incident_is_open() -> None:
    job = begin()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.go_on_until(lambda: 2 in job.rounds(), 5.0)
    verdict_id = job.write_verdict(round=2)
    job.drive()
    assert not job.has_outcome(verdict_id)
    job.go_on_until(job.goes_on(3), 5.0)
    # Then it is judged as any other verdict.
    assert [incident.kind for incident in job.incidents()] == [IncidentKind.FAILURE, IncidentKind.STRAGGLER]


def test_duplicate_verdict_is_applied_once() -> None:
    job = begin(APPROVAL)
    first, second = job.write_verdict(), job.write_verdict()
    job.drive()
    found = [job.outcome(one) for one in (first, second)]
    assert [one.kind for one in found] == [OutcomeKind.WAITING, OutcomeKind.DECLINED]
    assert found[1].reason == f"verdict {first} has the same content, and its outcome is waiting"


def test_dry_run_only_records_its_decision() -> None:
    job = begin(DRY_RUN)
    verdict_id = job.write_verdict()
    job.drive()
    outcome = job.outcome(verdict_id)
    assert outcome.kind is OutcomeKind.DRY_RUN
    assert outcome.gain_s > outcome.cost_s
    job.go_on(2.0)
    assert job.incidents() == []
    assert not [key for key in job.etcd.items if "/cordons/" in key]


def test_an_approved_verdict_is_carried_out() -> None:
    job = begin(APPROVAL)
    verdict_id = job.write_verdict()
    job.drive()
    revision = job.etcd.revision
    job.drive()
    assert job.etcd.revision == revision, "it waits silently"
    request = job.ask_about(RequestKind.APPROVE, verdict_id)
    job.drive()
    reply = job.answer(request)
    assert (reply.is_accepted, reply.is_done) == (True, False)
    outcome = job.outcome(verdict_id)
    assert (outcome.kind, outcome.by) == (OutcomeKind.ACTED, "me@here")
    job.go_on_until(job.goes_on(2), 5.0)
    job.go_on(1.0)
    assert job.members(2) == ["host-0", "host-1"]
    assert job.answer(request).is_done
    assert job.incidents()[0].kind is IncidentKind.STRAGGLER


def test_person_may_approve_an_eviction_that_costs_more() -> None:
    job = begin(replace(APPROVAL, train_steps=40, restart_cost_s=0.2))
    verdict_id = job.write_verdict()
    job.drive()
    job.go_on(5.0)
    job.ask_about(RequestKind.APPROVE, verdict_id)
    job.drive()
    outcome = job.outcome(verdict_id)
    assert (outcome.kind, outcome.gain_s) == (OutcomeKind.ACTED, 0.0)


def test_a_dismissed_verdict_is_over_and_stands() -> None:
    job = begin(APPROVAL)
    verdict_id = job.write_verdict()
    job.drive()
    request = job.ask_about(RequestKind.DISMISS, verdict_id)
    job.drive()
    assert job.answer(request).text == f"dismissed {verdict_id}"
    outcome = job.outcome(verdict_id)
    assert (outcome.kind, outcome.by) == (OutcomeKind.DECLINED, "me@here")
    assert "has the same content" in job.declined()
    again = job.ask_about(RequestKind.APPROVE, verdict_id)
    job.drive()
    assert not job.answer(again).is_accepted
    assert "already has the outcome declined by me@here" in job.answer(again).text
    job.go_on(1.0)
    assert job.incidents() == []


def test_an_approval_that_comes_too_late_is_refused() -> None:
    job = begin(APPROVAL)
    verdict_id = job.write_verdict()
    job.drive()
    job.hosts["host-0"].fail(job.now, is_cascade=False)
    job.go_on_until(job.goes_on(2), 5.0)
    job.go_on(0.5)
    outcome = job.outcome(verdict_id)
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DECLINED, "round 1 is over, and it was not approved in time")
    request = job.ask_about(RequestKind.APPROVE, verdict_id)
    job.drive()
    assert not job.answer(request).is_accepted


def test_approval_beyond_the_limit_is_refused_with_the_rule() -> None:
    job = begin(replace(APPROVAL, evictions_per_hour=0))
    verdict_id = job.write_verdict()
    request = job.ask_about(RequestKind.APPROVE, verdict_id)
    job.drive()
    answer = job.answer(request)
    assert (answer.is_accepted, answer.is_done) == (False, True)
    assert answer.text.startswith(f"verdict {verdict_id} is declined: 1 host would be evicted as stragglers")


def test_an_unknown_verdict_cannot_be_approved() -> None:
    job = begin(APPROVAL)
    job.write_verdict(verdict_id="v-7")
    job.drive()
    request = job.ask_about(RequestKind.APPROVE, "v-8")
    job.drive()
    assert not job.answer(request).is_accepted
    assert job.answer(request).text == "no verdict 'v-8'; waiting for a person: v-7"


def test_slow_host_stays_when_the_spare_is_lost() -> None:
    """A slow host is better than none: its cordon is removed if no other host can replace it."""
    job = begin()
    job.write_verdict()
    job.drive()
    spare = job.hosts["host-1"]
    spare.kill()
    spare.lose_lease()
    job.go_on_until(job.goes_on(2), 20.0)
    assert job.members(2) == ["host-0", "host-2"]
    assert KEYS.cordon("host-2") not in job.etcd.items


def test_unreadable_verdict_is_declined() -> None:
    job = begin()
    raws = [b"junk", b"{}", b'{"schema_version":1,"verdict_id":"other"}', b"\xff\xfe"]
    for number, raw in enumerate(raws):
        job.etcd.put(KEYS.verdict(f"v-{number}"), raw)
    job.drive()
    for number, raw in enumerate(raws):
        outcome = job.outcome(f"v-{number}")
        assert outcome.kind is OutcomeKind.DECLINED, raw
        assert "cannot be read" in outcome.reason, raw
    job.drive()
    decision = job.driver.decide(job.now)
    assert decision is not None
    assert decision.actions == (), "alarms end, and every outcome is written once"


def test_a_key_that_cannot_be_a_verdict_is_taken_away() -> None:
    job = begin()
    job.etcd.put(KEYS.verdict("a/b"), b"{}")
    job.drive()
    assert KEYS.verdict("a/b") not in job.etcd.items
    assert not job.has_outcome("a/b")


def test_verdict_on_a_hang_is_evidence_of_its_incident() -> None:
    job = begin()
    verdict_id = job.write_verdict(kind=VerdictKind.HANG, evidence=("rank 2 never entered collective 7",))
    job.drive()
    assert not job.has_outcome(verdict_id)
    job.stall("host-0", "host-2")
    job.go_on_until(lambda: job.has_outcome(verdict_id), 30.0)
    (incident,) = job.incidents()
    outcome = job.outcome(verdict_id)
    assert (outcome.kind, outcome.incident) == (OutcomeKind.ACTED, incident.incident_id)
    assert "rank 2 never entered collective 7" in incident.evidence
    assert incident.verdict == verdict_id


def test_second_verdict_on_a_hang_is_declined_with_the_first() -> None:
    job = begin()
    first = job.write_verdict(kind=VerdictKind.HANG, hosts=("host-0", "host-1"))
    job.drive()
    second = job.write_verdict(kind=VerdictKind.HANG, hosts=("host-0",))
    job.stall("host-0", "host-2")
    job.go_on_until(lambda: job.has_outcome(second), 30.0)
    (incident,) = job.incidents()
    assert [job.outcome(one).kind for one in (first, second)] == [OutcomeKind.ACTED, OutcomeKind.DECLINED]
    assert incident.verdict == first
    assert f"{incident.incident_id} has the evidence of verdict {first}" in job.outcome(second).reason


def test_hang_verdict_without_a_hang_is_declined_later() -> None:
    job = begin()
    verdict_id = job.write_verdict(kind=VerdictKind.HANG)
    job.go_on(59.0, step_s=1.0)
    assert not job.has_outcome(verdict_id)
    job.go_on(2.0, step_s=1.0)
    assert job.outcome(verdict_id).kind is OutcomeKind.DECLINED
    assert list(job.rounds()) == [1]


def test_verdicts_of_a_job_that_is_over_are_answered() -> None:
    job = begin(APPROVAL)
    waiting = job.write_verdict()
    job.drive()
    job.hosts["host-0"].fail(job.now, is_cascade=False, exit_code=78)
    job.go_on_until(job.is_over, 5.0)
    late = job.write_verdict()
    job.drive()
    for verdict_id in (waiting, late):
        assert job.outcome(verdict_id).kind is OutcomeKind.DECLINED


def test_a_flood_is_answered_in_turns_and_kept_bounded() -> None:
    job = begin()
    names = [job.write_verdict(cause=Cause.GC) for _ in range(150)]
    for _ in range(5):
        job.drive()
    assert all(job.has_outcome(name) for name in names)
    trims = trims_of(KEYS, job.state().seen, num_verdicts=140)
    gone = [trim.keys.start.decode() for trim in trims]
    # Each verdict is deleted before its outcome; a verdict without an outcome would be judged again.
    assert gone == [key for name in names[:10] for key in (KEYS.verdict(name), KEYS.outcome(name))]
    job.etcd.delete([KEYS.verdict(names[20])])
    job.drive()
    trims = trims_of(KEYS, job.state().seen, num_verdicts=500)
    assert [trim.keys.start.decode() for trim in trims] == [KEYS.outcome(names[20])]
