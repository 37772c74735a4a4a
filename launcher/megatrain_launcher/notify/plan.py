"""Plans the next message to a receiver: the job's state minus what earlier messages reported. No I/O and no clock.

There is no queue: each comparison, by this driver or the next one, finds what was not sent yet. A receiver that is
unreachable for a while therefore costs no memory, and misses nothing that still matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from megatrain.contracts.records.incident import TOPIC_PREFIX
from megatrain.contracts.records.notices import Receipt, ReceiverRecord
from megatrain_job.jobs.health import HealthLevel
from megatrain_launcher.notify.topics import Event, Stage, Topic, gone_topic, is_at_least, worst_level

HOUR_S = 3600.0
GIVE_UP_S = HOUR_S
"""A topic that was over for this long before any message reported it is not sent. An open topic is sent at any time."""
REFRESH_S = 60.0
"""The interval at which open alerts are repeated to an Alertmanager, which ends alerts that are not repeated."""
_AT_ONCE = 3
_FIRST_GAP_S = 60.0
_MAX_GAP_S = 900.0
_MAX_TOPICS = 20
"""Maximum number of topics in one message."""
_MAX_RECEIPTS = 8
"""Maximum number of receipts of one incident. Its messages are: begun, being repaired, worse, over."""
_MAX_WITH_RECEIPTS = 20
"""Receipts are kept for this many of the newest incidents; the driver has copied those of older ones."""


class DeliveryMode(StrEnum):
    """The way in which a receiver gets its messages."""

    DIGEST = "digest"
    """For people to read: one message contains everything that happened meanwhile."""
    PAGE = "page"
    """Each new topic pages an engineer: new topics are sent one at a time, the worst first, unless they are over."""
    STATE = "state"
    """The receiver keeps the state and groups it: all open topics are sent, repeatedly."""

    @property
    def keeps_state(self) -> bool:
        """Whether the receiver keeps a topic open until a message closes it."""
        return self is not DeliveryMode.DIGEST


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that select the topics for one receiver."""

    delivery_mode: DeliveryMode
    level: HealthLevel
    events: frozenset[str]

    def covers(self, topic: Topic) -> bool:
        return topic.event is Event.TEST or (topic.event in self.events and is_at_least(topic.level, self.level))


@dataclass(frozen=True, slots=True)
class Plan:
    """The next message to a receiver. In `record`, topics that need not be sent are marked as if they had been sent."""

    record: ReceiverRecord
    topics: tuple[Topic, ...] = ()
    """The topics of the message: first the new ones or, with DeliveryMode.STATE, all open ones; then those that ended,
    and with DeliveryMode.PAGE those that advanced. Empty: nothing is sent."""
    waiting: tuple[Topic, ...] = ()
    """New topics that are sent later, so that a job that fails repeatedly does not page a hundred times."""
    wake_unix_s: float | None = None
    """The time at which to plan again, even if nothing changes."""
    outdated: tuple[Topic, ...] = ()
    """With DeliveryMode.STATE: topics whose level changed, with the level that was sent last, to end these alerts."""


def begin_record(receiver: str, topics: Sequence[Topic]) -> ReceiverRecord:
    """Return the record of a receiver that got no message yet. Topics that are already over are marked as sent."""
    return ReceiverRecord(receiver, {topic.name: topic.mark for topic in topics if topic.stage is Stage.CLOSED})


def plan_of(
    topics: Sequence[Topic], record: ReceiverRecord, rules: Rules, now_s: float, refreshed_s: float = 0.0
) -> Plan:
    """Return what to send a receiver now. `refreshed_s`: when all open topics were last sent to it, unix seconds."""
    present = {topic.name for topic in topics}
    gone = [
        gone_topic(name, mark, now_s)
        for name, mark in record.notified.items()
        if name not in present and _stage(mark) is not Stage.CLOSED
    ]
    wanted = [topic for topic in (*topics, *gone) if rules.covers(topic) or topic.name in record.notified]
    news, endings, progress, settled, wake_s = _sorted_out(wanted, record, rules, now_s)
    kept = {name: mark for name, mark in record.notified.items() if name in present or _stage(mark) is not Stage.CLOSED}
    num_late = sum(rules.delivery_mode is DeliveryMode.DIGEST for _ in settled)
    record = replace(
        record,
        notified={**kept, **{topic.name: topic.mark for topic in settled}},
        opened_unix_s=_of_last_hour(record, now_s),
        receipts={name: record.receipts[name] for name in sorted(record.receipts)[-_MAX_WITH_RECEIPTS:]},
        num_given_up=record.num_given_up + num_late,
    )
    now, later, spaced_s = _chosen(news, record, rules, now_s)
    sent = (*now, *endings, *progress)
    if rules.delivery_mode is DeliveryMode.STATE:
        # any message to such a receiver contains all open topics
        opened = [topic for topic in wanted if topic.stage is not Stage.CLOSED and topic.ready_unix_s <= now_s]
        is_due = bool(sent) or (bool(opened) and now_s >= refreshed_s + REFRESH_S)
        sent = (*opened, *endings) if is_due else ()
        wake_s = min(_times(wake_s, (now_s if is_due else refreshed_s) + REFRESH_S if opened else None), default=None)
    sent = sent[:_MAX_TOPICS]
    outdated = tuple(_outdated(sent, record, now_s)) if rules.delivery_mode is DeliveryMode.STATE else ()
    return Plan(record, sent, later, min(_times(wake_s, spaced_s), default=None), outdated)


def taken(record: ReceiverRecord, plan: Plan, now_s: float) -> ReceiverRecord:
    """Return the record after a receiver has accepted the message of a plan."""
    new = [topic for topic in plan.topics if _is_news(topic, record.notified.get(topic.name))]
    opened = dict(record.opened_unix_s)
    if new:
        level = str(worst_level(new))
        opened[level] = (*opened.get(level, ()), now_s)
    return replace(
        record,
        notified={**record.notified, **{topic.name: topic.mark for topic in plan.topics}},
        opened_unix_s=opened,
        num_sent=record.num_sent + 1,
        problem="",
        receipts=_with_receipts(record, plan, "", now_s),
    )


def refused(record: ReceiverRecord, plan: Plan, problem: str, now_s: float) -> ReceiverRecord:
    """Return the record after a try that failed: the topics of the plan must still be sent."""
    receipts = _with_receipts(record, plan, problem, now_s)
    return replace(record, num_failed=record.num_failed + 1, problem=problem, receipts=receipts)


def _with_receipts(record: ReceiverRecord, plan: Plan, problem: str, now_s: float) -> Mapping[str, tuple[Receipt, ...]]:
    """Return the receipts after a try to send a plan; `problem` empty: the receiver accepted it."""
    receipts = dict(record.receipts)
    for topic in plan.topics:
        if topic.name.startswith(TOPIC_PREFIX):
            known = receipts.get(topic.name, ())
            receipts[topic.name] = _with_receipt(known, Receipt(record.receiver, topic.stage, now_s, problem))
    return receipts


def _with_receipt(known: tuple[Receipt, ...], new: Receipt) -> tuple[Receipt, ...]:
    """Return receipts with a new one. Several tries share one receipt; a repeat to an Alertmanager adds none."""
    last = next((receipt for receipt in reversed(known) if receipt.stage == new.stage), None)
    if last is None or (not last.problem and new.stage != known[-1].stage):
        num_failed = int(bool(new.problem))
        return (*known, replace(new, num_failed=num_failed))[-_MAX_RECEIPTS:]
    if not last.problem:
        return known
    tried = replace(new, num_failed=last.num_failed + bool(new.problem))
    return tuple(tried if receipt is last else receipt for receipt in known)


_Sorted = tuple[list[Topic], list[Topic], list[Topic], list[Topic], float | None]


def _sorted_out(wanted: Sequence[Topic], record: ReceiverRecord, rules: Rules, now_s: float) -> _Sorted:
    """Return the topics that are new, ended, advanced, and not to be sent; and when the next one is ready."""
    news: list[Topic] = []
    endings: list[Topic] = []
    progress: list[Topic] = []
    settled: list[Topic] = []
    wake_s: float | None = None
    for topic in wanted:
        known = record.notified.get(topic.name)
        if topic.stage is Stage.CLOSED and known is None:
            is_late = now_s - (topic.ended_unix_s or topic.began_unix_s) > GIVE_UP_S
            (settled if is_late or rules.delivery_mode is not DeliveryMode.DIGEST else news).append(topic)
        elif topic.stage is Stage.CLOSED:
            if _stage(known or "") is not Stage.CLOSED:
                endings.append(topic)
        elif topic.ready_unix_s > now_s:
            wake_s = min(_times(wake_s, topic.ready_unix_s))
        elif _is_news(topic, known):
            # the first message about a topic reports its beginning, however far it has advanced
            news.append(replace(topic, stage=Stage.OPEN))
        elif rules.delivery_mode is DeliveryMode.PAGE and topic.stage is not _stage(known or ""):
            progress.append(topic)
    return news, endings, progress, settled, wake_s


def _chosen(
    news: Sequence[Topic], record: ReceiverRecord, rules: Rules, now_s: float
) -> tuple[tuple[Topic, ...], tuple[Topic, ...], float | None]:
    """Return which new topics are sent now, which later, and the time at which the next may be sent."""
    ordered = sorted(news, key=lambda topic: (not is_at_least(topic.level, HealthLevel.RED), topic.began_unix_s))
    if rules.delivery_mode is DeliveryMode.STATE:
        return tuple(ordered), (), None
    free_at = {topic.level: _free_at(record.opened_unix_s.get(str(topic.level), ())) for topic in ordered}
    lead = next((topic for topic in ordered if free_at[topic.level] <= now_s), None)
    if lead is None:
        return (), tuple(ordered), min(free_at.values(), default=None)
    rest = [topic for topic in ordered if topic is not lead]
    if rules.delivery_mode is DeliveryMode.DIGEST:
        return (lead, *rest), (), None
    return (lead,), tuple(rest), now_s if rest else None


def _free_at(opened: Sequence[float]) -> float:
    """Return when the next new topic may be sent: three within an hour at once, further ones at growing intervals."""
    num_more = len(opened) - _AT_ONCE
    return 0.0 if num_more < 0 else max(opened) + min(_FIRST_GAP_S * 2**num_more, _MAX_GAP_S)


def _is_news(topic: Topic, known: str | None) -> bool:
    """Return whether a topic must be sent as new. `known`: the mark of the last message about it, None without one."""
    if known is None:
        return True
    if topic.stage is Stage.CLOSED:
        return False
    known_level = known.partition(":")[2]
    is_worse = known_level not in set(HealthLevel) or not is_at_least(HealthLevel(known_level), topic.level)
    return _stage(known) is Stage.CLOSED or is_worse


def _outdated(sent: Sequence[Topic], record: ReceiverRecord, now_s: float) -> Iterator[Topic]:
    """Yield the ends of alerts that were sent with another level, which is one of an alert's labels."""
    for topic in sent:
        known = record.notified.get(topic.name, "")
        level = known.partition(":")[2]
        if _stage(known) is not Stage.CLOSED and level in set(HealthLevel) and level != topic.level:
            yield replace(topic, level=HealthLevel(level), stage=Stage.CLOSED, ended_unix_s=now_s)


def _stage(mark: str) -> Stage:
    stage = mark.partition(":")[0]
    return Stage(stage) if stage in set(Stage) else Stage.CLOSED


def _of_last_hour(record: ReceiverRecord, now_s: float) -> dict[str, tuple[float, ...]]:
    recent = {
        level: tuple(moment for moment in moments if now_s - HOUR_S < moment <= now_s)
        for level, moments in record.opened_unix_s.items()
    }
    return {level: moments for level, moments in recent.items() if moments}


def _times(*moments: float | None) -> Iterator[float]:
    return (moment for moment in moments if moment is not None)
