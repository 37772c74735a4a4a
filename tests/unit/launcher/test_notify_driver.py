"""Real drivers on a real etcd notify real receivers once, whichever host drives and whatever a receiver answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.config import Config
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import HostPhase, RankFailure
from megatrain.contracts.records.host_verdict import (
    Cause,
    HostVerdict,
    OutcomeKind,
    VerdictConfidence,
    VerdictKind,
    VerdictOutcome,
)
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain.contracts.records.job_requests import JobRequest, RequestKind
from megatrain.contracts.records.notices import ReceiverRecord
from megatrain.contracts.records.problem_reports import DriverReport
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import Halt, JobEnd, Round
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.notify import notifier
from tests.helpers.driver_candidates import KEYS, NOW, CandidateHosts, DriverCandidate
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.http_receiver import HttpReceiver, ReceiverReply
from tests.helpers.launched_job import make_record
from tests.helpers.notification_topics import config_with, write_secret
from tests.helpers.waiting import wait_until


@dataclass
class Story:
    """A job of two hosts that a test leads through an incident."""

    etcd: EtcdServers
    root: Path
    stack: ExitStack
    client: EtcdClient
    hosts: CandidateHosts
    candidates: list[DriverCandidate] = field(default_factory=list)

    def candidate(self, config: Config | None, name: str = "one") -> DriverCandidate:
        found = DriverCandidate(self.etcd, name, self.root / "incidents", config=config)
        self.stack.callback(found.close)
        self.candidates.append(found)
        return found

    def train(self, number: int) -> None:
        self.hosts.wait_for(Round, KEYS.round(number))
        self.hosts.train(number)

    def fail(self, number: int, exit_code: int = -9) -> None:
        """A rank of host-1 ends, and both hosts stop their workers."""
        wait_until(lambda: any(one.driver.is_leading for one in self.candidates), "a driver")
        failure = RankFailure(1, exit_code, NOW)
        self.hosts.say(1, HostPhase.FAILED, number, min_step=12, failures=(failure,))
        self.hosts.wait_for(Halt, KEYS.halt(number))
        self.hosts.say(0, HostPhase.STOPPED, number, min_step=12)
        self.hosts.say(1, HostPhase.STOPPED, number, min_step=12, failures=(failure,))

    def incidents(self) -> list[Incident]:
        everything = KeyRange.prefix(KEYS.directory("incidents"))
        found = [self.hosts.read(Incident, item.key.decode()) for item in self.client.read_all(everything).items]
        return [one for one in found if one is not None]

    def recovered(self) -> list[Incident]:
        def is_over() -> bool:
            return any(incident.state is IncidentState.RECOVERED for incident in self.incidents())

        wait_until(is_over, "the end")
        return self.incidents()

    def record(self, receiver: str = "webhook") -> ReceiverRecord | None:
        return self.hosts.read(ReceiverRecord, KEYS.notices(receiver))

    def wait_notified(self, num_sent: int) -> ReceiverRecord:
        wait_until(lambda: (one := self.record()) is not None and one.num_sent >= num_sent, "the record")
        found = self.record()
        assert found is not None
        return found

    def receipts(self, incident: Incident) -> list[tuple[str, str, str]]:
        """Return the receipts in an incident's file: receiver, the delivered message, or the reason of the failure."""
        path = self.root / "incidents" / f"{incident.incident_id}.json"
        if not path.exists():  # The driver writes its files in another thread.
            return []
        found = decode(Incident, path.read_bytes(), "").receipts
        return [(receipt.receiver, receipt.stage, receipt.problem) for receipt in found]

    def alarms(self) -> tuple[str, ...]:
        found = self.hosts.read(DriverReport, KEYS.report)
        return () if found is None else found.alarms


@pytest.fixture
def story(etcd: EtcdServers, tmp_path: Path) -> Iterator[Story]:
    with ExitStack() as stack:
        client = stack.enter_context(EtcdClient(EtcdSettings.of(etcd.urls)))
        client.delete(KeyRange.prefix(KEYS.prefix))
        client.put(KEYS.record, encode(make_record(job=KEYS.job, config_hash="", num_workers=1)))
        stack.callback(client.delete, KeyRange.prefix(KEYS.prefix))
        yield Story(etcd, tmp_path, stack, client, CandidateHosts(client))


def webhook(story: Story, receiver: HttpReceiver, more: str = "") -> Config:
    return config_with(story.root, f'[webhook]\nurl = "{receiver.url}/hook"\n{more}')


def topics(documents: list[Any]) -> list[tuple[str, str]]:
    return [(topic["topic"], topic["stage"]) for document in documents for topic in document["topics"]]


def test_an_incident_is_reported_as_it_opens_and_as_it_is_over(story: Story) -> None:
    with HttpReceiver() as receiver:
        story.candidate(webhook(story, receiver))
        story.train(1)
        story.fail(1)
        receiver.wait_for(1)
        story.train(2)
        (incident,) = story.recovered()
        documents = receiver.wait_for(2)
        story.wait_notified(2)
        wait_until(lambda: story.receipts(incident) == [("webhook", "open", ""), ("webhook", "closed", "")], "receipts")
    name = f"incident/{incident.incident_id}"
    assert topics(documents) == [(name, "open"), (name, "closed")]
    opened, closed = (document["topics"][0] for document in documents)
    for one in (opened, closed):
        assert one["hosts"] == list(incident.culprit_hosts) == ["host-1"]
        assert one["ranks"] == list(incident.culprit_ranks) == [1]
        assert one["step"] == incident.last_step == 12
        assert incident.reason in one["what"]
        assert one["key"] == f"megatrain/job/{name}"
    assert f"{incident.steps_lost} steps lost" in closed["lost"]
    assert closed["now"] == "the job trains again since step 5"
    assert (documents[0]["level"], documents[1]["is_over"]) == ("amber", True)


def test_receivers_of_a_kind_have_their_own_rules(story: Story) -> None:
    with HttpReceiver() as first, HttpReceiver() as second, HttpReceiver() as third:
        sections = [
            f'[[webhook]]\nurl = "{receiver.url}/hook"\nlevel = "{level}"\n'
            for receiver, level in ((first, "amber"), (second, "red"), (third, "amber"))
        ]
        story.candidate(config_with(story.root, "".join(sections)))
        story.train(1)
        story.fail(1)
        # An incident that is over before it was reported is one message.
        first.wait_for(1)
        third.wait_for(1)
        story.train(2)
        story.recovered()
        reported = first.wait_for(2)
        assert topics(third.wait_for(2)) == topics(reported)
        wait_until(lambda: (one := story.record("webhook-3")) is not None and one.num_sent == 2, "the record")
    assert second.posted == []


@pytest.mark.slow
def test_next_driver_sends_only_the_end(story: Story) -> None:
    with HttpReceiver() as receiver:
        config = webhook(story, receiver)
        first = story.candidate(config, "first")
        story.train(1)
        story.fail(1)
        story.wait_notified(1)
        first.die()
        story.client.revoke_lease(first.keeper.lease_id)
        story.candidate(config, "second")
        story.train(2)
        (incident,) = story.recovered()
        documents = receiver.wait_for(2)
        story.wait_notified(2)
    name = f"incident/{incident.incident_id}"
    assert topics(documents) == [(name, "open"), (name, "closed")]


def test_new_driver_repeats_an_unconfirmed_message(story: Story) -> None:
    """It is unknown whether the receiver accepted it: it is sent again, with the same key."""
    with HttpReceiver(ReceiverReply(hold=threading.Event())) as receiver:
        config = webhook(story, receiver)
        first = story.candidate(config, "first")
        story.train(1)
        story.fail(1)
        receiver.wait_for(1)
        assert (record := story.record()) is None or not record.notified
        first.die()
        story.client.revoke_lease(first.keeper.lease_id)
        story.candidate(config, "second")
        documents = receiver.wait_for(2)
        story.wait_notified(1)
    first_key, second_key = (document["topics"][0]["key"] for document in documents)
    assert first_key == second_key


def test_replaced_driver_writes_no_receipt(story: Story) -> None:
    """The receiver's acceptance arrives when another driver leads already: the other driver's record counts."""
    hold = threading.Event()
    with HttpReceiver(ReceiverReply(hold=hold)) as receiver:
        config = webhook(story, receiver)
        first = story.candidate(config, "first")
        story.train(1)
        story.fail(1)
        receiver.wait_for(1)
        # Its lease is gone, and it has not noticed yet.
        story.client.revoke_lease(first.keeper.lease_id)
        second = story.candidate(config, "second")
        receiver.wait_for(2)
        record = story.wait_notified(1)
        hold.set()
        wait_until(lambda: second.driver.is_leading and not first.driver.is_leading, "the second")
        first.close()
        assert story.record() == record


def test_silent_receiver_delays_no_recovery_and_no_other(story: Story) -> None:
    hold = threading.Event()
    with HttpReceiver(ReceiverReply(hold=hold)) as silent, HttpReceiver() as other:
        url = write_secret(story.root / "url", f"{other.url}/services/x")
        story.candidate(webhook(story, silent, f'[slack]\nurl_file = "{url}"\n[notify]\ntimeout_s = 60.0\n'))
        story.train(1)
        story.fail(1)
        silent.wait_for(1)
        other.wait_for(1)
        story.train(2)
        (incident,) = story.recovered()
        other.wait_for(2)
        assert len(silent.posted) == 1, "the driver still waits for its first answer"
        hold.set()
        documents = silent.wait_for(2)
        story.wait_notified(2)
    name = f"incident/{incident.incident_id}"
    assert topics(documents) == [(name, "open"), (name, "closed")]


@pytest.mark.slow(kept=["500"])
@pytest.mark.parametrize(
    "reply", [ReceiverReply(500, body=b"boom"), ReceiverReply(is_dropped=True)], ids=["500", "dropped"]
)
def test_failing_receiver_is_tried_again_and_reported(story: Story, reply: ReceiverReply) -> None:
    with HttpReceiver(usual=reply) as receiver:
        story.candidate(webhook(story, receiver))
        story.train(1)
        story.fail(1)
        story.train(2)
        wait_until(lambda: any("webhook cannot be notified" in alarm for alarm in story.alarms()), "the alarm")
        record = story.record()
        assert record is not None
        assert (record.num_sent, record.notified) == (0, {})
        assert record.num_failed >= 1
        assert "127.0.0.1" in record.problem
        receiver.usual = ReceiverReply()
        story.wait_notified(1)
        wait_until(lambda: not any("cannot be notified" in alarm for alarm in story.alarms()), "the alarm's end")
    assert {document["topics"][0]["key"] for document in receiver.documents} == {
        receiver.documents[0]["topics"][0]["key"]
    }


def test_unreadable_secret_is_reported_early(story: Story) -> None:
    path = write_secret(story.root / "url", "https://hooks.slack.com/services/hidden", 0o644)
    story.candidate(config_with(story.root, f'[slack]\nurl_file = "{path}"\n'))
    story.train(1)
    wait_until(lambda: any("has mode 644" in alarm for alarm in story.alarms()), "the alarm")
    everything = story.client.read_all(KeyRange.prefix(KEYS.prefix)).items
    assert not any(b"hidden" in item.value for item in everything)


def test_the_end_of_a_job_is_reported_before_its_driver_leaves(story: Story) -> None:
    with HttpReceiver() as receiver:
        one = story.candidate(webhook(story, receiver))
        story.train(1)
        story.fail(1, exit_code=int(ExitCode.CONFIG))
        end = story.hosts.wait_for(JobEnd, KEYS.end)
        one.close()
        reported = dict(topics(receiver.documents))
        last = receiver.documents[-1]
    assert end.exit_code == ExitCode.CONFIG
    assert reported[f"end/{end.created_unix_s:.3f}"] == "open"
    assert (last["level"], last["topics"][0]["event"]) == ("red", "end")
    assert end.reason in last["topics"][0]["what"]
    assert "fix the cause, then start the job again" in last["topics"][0]["who_acts"]


def test_receipts_after_the_last_decision_are_kept_too(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, close = threading.Event(), notifier.Notifier.close

    def release_and_close(self: notifier.Notifier, *, is_job_over: bool) -> None:
        hold.set()  # The driver makes no more decisions.
        close(self, is_job_over=is_job_over)

    monkeypatch.setattr(notifier.Notifier, "close", release_and_close)
    with HttpReceiver(usual=ReceiverReply(hold=hold)) as receiver:
        one = story.candidate(webhook(story, receiver, "[notify]\ntimeout_s = 60.0\n"))
        story.train(1)
        story.fail(1, exit_code=int(ExitCode.CONFIG))
        story.hosts.wait_for(JobEnd, KEYS.end)
        receiver.wait_for(1)
        one.close()
    (incident,) = story.incidents()
    assert story.receipts(incident)[-1] == ("webhook", "closed", "")


def test_end_of_a_job_waits_briefly_for_a_dead_receiver(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "LAST_S", 0.2)
    hold = threading.Event()
    with HttpReceiver(usual=ReceiverReply(hold=hold)) as receiver:
        one = story.candidate(webhook(story, receiver, "[notify]\ntimeout_s = 60.0\n"))
        story.train(1)
        story.fail(1, exit_code=int(ExitCode.CONFIG))
        story.hosts.wait_for(JobEnd, KEYS.end)
        receiver.wait_for(1)
        one.close()  # returns although there was no answer
        assert not hold.is_set()


@pytest.mark.slow
def test_planned_stop_is_not_reported(story: Story) -> None:
    with HttpReceiver() as receiver:
        one = story.candidate(webhook(story, receiver))
        story.train(1)
        request = JobRequest("q1", RequestKind.STOP, "me@here")
        story.client.put(KEYS.request("q1"), encode(request))
        story.hosts.wait_for(Halt, KEYS.halt(1))
        for host in range(2):
            story.hosts.say(host, HostPhase.STOPPED, 1, min_step=12, exit_code=int(ExitCode.SAVED_AND_STOPPED))
        story.hosts.wait_for(JobEnd, KEYS.end)
        one.close()
    assert receiver.posted == []


@pytest.mark.slow
def test_waiting_verdict_is_reported_until_it_is_answered(story: Story) -> None:
    with HttpReceiver() as receiver:
        story.candidate(webhook(story, receiver))
        story.train(1)
        wait_until(lambda: "round 1 trains" in story.candidates[0].driver.reason, "training")
        verdict = HostVerdict(
            "v1", VerdictKind.STRAGGLER, 1, Cause.COMPUTE, VerdictConfidence.HIGH, NOW, "daemon", ("host-1",), (1,)
        )
        outcome = VerdictOutcome("v1", OutcomeKind.WAITING, "waits for a person: host-1 is slow", "one", NOW)
        story.client.put(KEYS.outcome("v1"), encode(outcome))
        story.client.put(KEYS.verdict("v1"), encode(verdict))
        (reported,) = receiver.wait_for(1)[0]["topics"]
        assert (reported["topic"], reported["stage"], reported["hosts"]) == ("verdict/v1", "open", ["host-1"])
        assert "megatrain job approve job --verdict v1" in reported["who_acts"]
        story.client.put(
            KEYS.request("q2"), encode(JobRequest("q2", RequestKind.DISMISS, "me@here", verdict="v1"))
        )  # fmt: skip
        documents = receiver.wait_for(2)
    assert topics(documents) == [("verdict/v1", "open"), ("verdict/v1", "closed")]
