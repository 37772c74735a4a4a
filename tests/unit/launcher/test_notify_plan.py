"""The messages of each receiver, and their times: the difference between the job's state and what the
receiver got."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatrain.contracts.records.notices import Receipt, ReceiverRecord
from megatrain.contracts.records.record import decode, encode
from megatrain_job.jobs.health import HealthLevel
from megatrain_launcher.notify.plan import (
    GIVE_UP_S,
    HOUR_S,
    REFRESH_S,
    DeliveryMode,
    begin_record,
    plan_of,
    refused,
    taken,
)
from megatrain_launcher.notify.topics import Event, Stage
from tests.helpers.notification_topics import NOW_S, InstantReceiver, make_topic, over, rules

DELIVERY_MODES = tuple(DeliveryMode)


def test_beginning_and_end_are_reported_once_each() -> None:
    for delivery_mode in DELIVERY_MODES:
        receiver, topic = InstantReceiver(delivery_mode), make_topic()
        for _ in range(3):
            receiver.send_due([topic], NOW_S)
        for _ in range(3):
            receiver.send_due([over(topic)], NOW_S + 5)
        receiver.send_due([], NOW_S + 9)
        assert receiver.marks == [["incident/one=open:amber"], ["incident/one=closed:amber"]], delivery_mode
        assert receiver.record.num_sent == 2, delivery_mode


def test_the_next_driver_repeats_nothing_and_forgets_nothing() -> None:
    for delivery_mode in DELIVERY_MODES:
        first, reported, unsent = InstantReceiver(delivery_mode), make_topic("incident/one"), make_topic("incident/two")
        first.send_due([reported], NOW_S)
        second = InstantReceiver(delivery_mode)
        second.record = decode(ReceiverRecord, encode(first.record), "etcd")
        second.refreshed_s = first.refreshed_s
        second.send_due([reported], NOW_S + 1)
        assert second.messages == [], delivery_mode
        second.send_due([over(reported), unsent], NOW_S + 2)
        assert sorted(mark for marks in second.marks for mark in marks) == [
            "incident/one=closed:amber",
            "incident/two=open:amber",
        ], delivery_mode


def test_a_new_receiver_gets_no_notice_of_ended_incidents() -> None:
    gone, here = over(make_topic("incident/gone")), make_topic("incident/here")
    record = begin_record("slack", [gone, here])
    plan = plan_of([gone, here], record, rules(DeliveryMode.DIGEST), NOW_S)
    assert [topic.name for topic in plan.topics] == ["incident/here"]


def test_topic_that_ended_unsent_is_sent_to_digests_only() -> None:
    """It is in a later digest; it causes no alert."""
    for delivery_mode, expected in [
        (DeliveryMode.DIGEST, [["incident/one=closed:amber"]]),
        (DeliveryMode.PAGE, []),
        (DeliveryMode.STATE, []),
    ]:
        receiver = InstantReceiver(delivery_mode)
        receiver.send_due([over(make_topic())], NOW_S + 5)
        assert receiver.marks == expected, delivery_mode


def test_ended_topic_is_given_up_after_an_hour() -> None:
    receiver = InstantReceiver(DeliveryMode.DIGEST)
    late = NOW_S + GIVE_UP_S + 1
    receiver.send_due([over(make_topic("incident/old")), make_topic("incident/open")], late)
    assert receiver.marks == [["incident/open=open:amber"]]
    assert receiver.record.num_given_up == 1
    receiver.send_due([over(make_topic("incident/old")), make_topic("incident/open")], late + 60)
    assert receiver.record.num_given_up == 1


def test_only_a_pager_is_notified_of_the_recovery_under_way() -> None:
    reported = {}
    for delivery_mode in (DeliveryMode.DIGEST, DeliveryMode.PAGE):
        receiver, topic = InstantReceiver(delivery_mode), make_topic()
        for stage in (Stage.OPEN, Stage.UNDER_WAY, Stage.UNDER_WAY):
            receiver.send_due([replace(topic, stage=stage)], NOW_S)
        receiver.send_due([over(topic)], NOW_S + 3)
        reported[delivery_mode] = [marks[0].partition("=")[2].partition(":")[0] for marks in receiver.marks]
    assert reported == {DeliveryMode.DIGEST: ["open", "closed"], DeliveryMode.PAGE: ["open", "under-way", "closed"]}


def test_a_pager_is_triggered_before_it_is_acknowledged() -> None:
    """The same if the job repairs it by itself before the first alert."""
    receiver = InstantReceiver(DeliveryMode.PAGE)
    receiver.send_due([replace(make_topic(), stage=Stage.UNDER_WAY)], NOW_S)
    assert receiver.marks == [["incident/one=open:amber"], ["incident/one=under-way:amber"]]


def test_only_worsening_is_reported_again() -> None:
    for delivery_mode in DELIVERY_MODES:
        receiver, topic = InstantReceiver(delivery_mode), make_topic("restarts", event=Event.RESTARTS)
        for level in (HealthLevel.AMBER, HealthLevel.RED, HealthLevel.AMBER):
            receiver.send_due([replace(topic, level=level)], NOW_S)
        assert receiver.marks == [["restarts=open:amber"], ["restarts=open:red"]], delivery_mode


def test_topic_that_disappears_is_closed() -> None:
    for delivery_mode in DELIVERY_MODES:
        receiver = InstantReceiver(delivery_mode)
        receiver.send_due([make_topic("verdict/v1", event=Event.VERDICT)], NOW_S)
        receiver.send_due([], NOW_S + 5)
        receiver.send_due([], NOW_S + 6)
        assert receiver.marks == [["verdict/v1=open:amber"], ["verdict/v1=closed:amber"]], delivery_mode
        assert receiver.messages[-1][0].event is Event.VERDICT, delivery_mode
        # It may be opened again.
        receiver.send_due([make_topic("verdict/v1", event=Event.VERDICT)], NOW_S + 7)
        assert receiver.marks[-1] == ["verdict/v1=open:amber"], delivery_mode


def test_a_receiver_gets_its_events_and_levels_only() -> None:
    for delivery_mode in DELIVERY_MODES:
        topics = [
            make_topic("incident/planned", level=HealthLevel.GREEN),
            make_topic("incident/amber"),
            make_topic("end/1", event=Event.END, level=HealthLevel.RED),
            make_topic("verdict/1", event=Event.VERDICT, level=HealthLevel.RED),
        ]
        receiver = InstantReceiver(delivery_mode, level=HealthLevel.RED, events=frozenset({"incident", "end"}))
        receiver.send_due(topics, NOW_S)
        assert receiver.marks == [["end/1=open:red"]], delivery_mode


def test_a_topic_waits_until_it_is_ready() -> None:
    topic = make_topic(ready_unix_s=NOW_S + 1.5)
    plan = plan_of([topic], ReceiverRecord("test"), rules(DeliveryMode.DIGEST), NOW_S)
    assert (plan.topics, plan.wake_unix_s) == ((), NOW_S + 1.5)
    assert plan_of([topic], plan.record, rules(DeliveryMode.DIGEST), NOW_S + 1.5).topics == (topic,)


@pytest.mark.slow
@pytest.mark.parametrize("delivery_mode", [DeliveryMode.DIGEST, DeliveryMode.PAGE])
@pytest.mark.parametrize("stays_open", [True, False])
def test_a_restart_loop_does_not_page_a_hundred_times(delivery_mode: DeliveryMode, *, stays_open: bool) -> None:
    """A failure every ten seconds for four hours: new messages are sent at most ten times in any hour."""
    receiver, incidents = InstantReceiver(delivery_mode), []
    for second in range(0, 4 * 3600, 10):
        now_s = NOW_S + second
        new = make_topic(f"incident/{second:06d}", began_unix_s=now_s, ready_unix_s=now_s)
        receiver.send_due([*incidents, new], now_s)
        incidents.append(new if stays_open else over(new, now_s + 5))
        incidents = incidents[-50:]
        receiver.send_due(incidents, now_s + 5)
    opened = [
        moment
        for moment, message in zip(receiver.times, receiver.messages, strict=True)
        if any(topic.stage is not Stage.CLOSED for topic in message) or (not stays_open and len(message) > 1)
    ]
    most = max(sum(begin <= moment < begin + HOUR_S for moment in opened) for begin in opened)
    assert most <= 10, most
    assert opened[:3] == [NOW_S, NOW_S + 10, NOW_S + 20]  # the first ones at once
    # Reminders continue: there is a message at least every hour.
    assert max(after - before for before, after in pairwise(opened)) <= 1000
    assert len(receiver.record.notified) <= 60
    assert sum(map(len, receiver.record.opened_unix_s.values())) <= 10


def test_red_is_not_held_back_by_amber() -> None:
    receiver = InstantReceiver(DeliveryMode.PAGE)
    amber = [make_topic(f"incident/{number}") for number in range(5)]
    receiver.send_due(amber, NOW_S)
    assert len(receiver.messages) == 3
    receiver.send_due([*amber, make_topic("end/1", event=Event.END, level=HealthLevel.RED)], NOW_S + 1)
    assert receiver.marks[3] == ["end/1=open:red"]


def test_a_digest_lists_the_worst_topic_first() -> None:
    receiver = InstantReceiver(DeliveryMode.DIGEST)
    topics = [make_topic("incident/a"), make_topic("end/1", event=Event.END, level=HealthLevel.RED)]
    receiver.send_due(topics, NOW_S)
    assert receiver.marks == [["end/1=open:red", "incident/a=open:amber"]]


def test_an_alertmanager_is_reminded_of_all_that_is_open() -> None:
    receiver, first, second = InstantReceiver(DeliveryMode.STATE), make_topic("incident/a"), make_topic("incident/b")
    receiver.send_due([first], NOW_S)
    receiver.send_due([first, second], NOW_S + 1)  # A message about one topic names all open topics.
    receiver.send_due([first, second], NOW_S + 2)
    receiver.send_due([first, second], NOW_S + 1 + REFRESH_S)
    plan = receiver.send_due([over(first), second], NOW_S + 2 + REFRESH_S)
    names = [[topic.name for topic in message] for message in receiver.messages]
    both = ["incident/a", "incident/b"]
    assert names == [["incident/a"], both, both, ["incident/b", "incident/a"]]
    assert plan.wake_unix_s == NOW_S + 2 + 2 * REFRESH_S


@pytest.mark.parametrize(("before", "after"), [("amber", "red"), ("red", "amber"), ("amber", "amber")])
@pytest.mark.parametrize("stage", [Stage.OPEN, Stage.CLOSED])
def test_alert_of_another_level_is_ended(before: str, after: str, stage: Stage) -> None:
    receiver, topic = InstantReceiver(DeliveryMode.STATE), make_topic(level=HealthLevel(before))
    receiver.send_due([topic], NOW_S)
    changed = replace(topic, level=HealthLevel(after), stage=stage, ended_unix_s=NOW_S + 2 * REFRESH_S)
    plan = plan_of([changed], receiver.record, receiver.rules, NOW_S + 2 * REFRESH_S, receiver.refreshed_s)
    assert plan.topics == (changed,)
    ended = replace(changed, level=HealthLevel(before), stage=Stage.CLOSED)
    assert plan.outdated == (() if before == after else (ended,))
    record = taken(plan.record, plan, NOW_S + 2 * REFRESH_S)
    assert plan_of([changed], record, receiver.rules, NOW_S + 4 * REFRESH_S).outdated == ()


def test_a_try_that_failed_leaves_all_to_be_reported() -> None:
    topic = make_topic()
    plan = plan_of([topic], ReceiverRecord("test"), rules(DeliveryMode.PAGE), NOW_S)
    record = refused(plan.record, plan, "it answers 500", NOW_S)
    assert (record.num_failed, record.num_sent, record.problem) == (1, 0, "it answers 500")
    again = plan_of([topic], record, rules(DeliveryMode.PAGE), NOW_S + 2)
    assert again.topics == (topic,)


def test_receipts_record_each_message_and_its_time() -> None:
    for delivery_mode in DELIVERY_MODES:
        receiver, topic = InstantReceiver(delivery_mode), make_topic()
        receiver.send_due([topic, make_topic("restarts", event=Event.RESTARTS)], NOW_S)
        # An Alertmanager gets a repetition, which is not a new message.
        receiver.send_due([topic], NOW_S + 2 * REFRESH_S)
        receiver.send_due([over(topic)], NOW_S + 200)
        reported = {
            name: [(one.stage, one.at_unix_s) for one in found] for name, found in receiver.record.receipts.items()
        }
        assert reported == {"incident/one": [("open", NOW_S), ("closed", NOW_S + 200)]}, delivery_mode


def test_receipt_has_the_attempts_and_the_last_error() -> None:
    plan = plan_of([make_topic()], ReceiverRecord("slack"), rules(DeliveryMode.DIGEST), NOW_S)
    record = plan.record
    for number, problem in enumerate(("no answer in time", "answers 404"), 1):
        record = refused(record, plan, problem, NOW_S + number)
    assert record.receipts == {"incident/one": (Receipt("slack", "open", NOW_S + 2, "answers 404", num_failed=2),)}
    record = taken(record, plan, NOW_S + 9)
    assert record.receipts == {"incident/one": (Receipt("slack", "open", NOW_S + 9, "", num_failed=2),)}


def test_receipts_are_bounded() -> None:
    record = ReceiverRecord("slack")
    for number in range(100):
        plan = plan_of([make_topic(f"incident/{number:03d}")], record, rules(DeliveryMode.STATE), NOW_S)
        record = taken(plan.record, plan, NOW_S)
    assert list(record.receipts) == [f"incident/{number:03d}" for number in range(79, 100)]
