"""The topics of a job at present, from the same data as `megatrain status`. Pure functions: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatrain.contracts.exit_codes import ExitCode, exit_text
from megatrain.contracts.records.host_verdict import HostVerdict, VerdictOutcome
from megatrain.contracts.records.incident import OVER_NOTE, Incident, IncidentKind, IncidentState
from megatrain.contracts.records.rounds import JobEnd
from megatrain.formatting import names_text, printable, short
from megatrain_job.jobs.health import Health, HealthLevel, Reason, ReasonCode
from megatrain_job.jobs.incident_phrases import KIND_TEXTS, cost_text, runbooks_of
from megatrain_job.jobs.snapshot import JobSnapshot
from megatrain_launcher.notify.topics import NO_ACTION, Event, Stage, Topic

JUDGED_S = 1.5
"""An incident whose response is not chosen within this time is sent with the facts known so far."""
SETTLED_S = 30.0
_OFTEN_BRIEF = frozenset(
    {
        ReasonCode.STUCK,
        ReasonCode.BROKEN,
        ReasonCode.HOST_LOST,
        ReasonCode.NOT_RUNNING,
        ReasonCode.WAITING_FOR_HOSTS,
        ReasonCode.STEP_LATE,
        ReasonCode.SAVE_FAILED,
        ReasonCode.NO_DRIVER,
        ReasonCode.DAEMON_SILENT,
        ReasonCode.DAEMON_PROBLEM,
        ReasonCode.STREAMER_SILENT,
        ReasonCode.METRICS_SILENT,
        ReasonCode.RANK_SILENT,
        ReasonCode.TELEMETRY_SILENT,
        ReasonCode.DRIVER_ALARM,
        ReasonCode.HOST_PROBLEM,
        ReasonCode.HOST_UNFIT,
    }
)
"""Reasons that a job may pass through on its way back to health: they must last for SETTLED_S before they are sent. All
others are sent at once."""
_MAX_CHARS = 600

_IN_OTHER_TOPICS = frozenset(
    {
        ReasonCode.RECOVERING,
        ReasonCode.REQUESTED,
        ReasonCode.HELD,
        ReasonCode.VERDICT_WAITING,
        ReasonCode.FAILED,
    }
)
"""Reasons that other topics report in more detail."""
_OF_RESTARTS = frozenset({ReasonCode.RESTART_BUDGET, ReasonCode.RESTART_LIMIT})
_PLANNED_ACTIONS = frozenset({"requeue"})


def topics_of(
    snapshot: JobSnapshot, health: Health, first_seen: Mapping[ReasonCode, float], now_s: float
) -> tuple[Topic, ...]:
    """Return all current topics. `first_seen`: when each of the health's reasons was first seen, unix seconds."""
    return tuple(_topics(snapshot, health, first_seen, now_s))


def _topics(
    snapshot: JobSnapshot, health: Health, first_seen: Mapping[ReasonCode, float], now_s: float
) -> Iterator[Topic]:
    newest = snapshot.newest_round
    for incident in (*snapshot.earlier_incidents, *snapshot.incidents):
        yield _of_incident(incident, is_of_newest_round=newest is not None and incident.round == newest.number)
    for outcome, verdict in snapshot.waiting:
        yield _of_verdict(snapshot.job, outcome, verdict)
    if snapshot.end is not None:
        yield _of_end(snapshot.end)
        return  # the message about its end covers everything else that is wrong with a finished job
    for reason in health.reasons:
        if reason.code not in _IN_OTHER_TOPICS:
            yield _of_reason(reason, first_seen.get(reason.code, now_s))


def _of_incident(incident: Incident, *, is_of_newest_round: bool) -> Topic:
    moments = incident.moments
    is_planned = incident.kind is IncidentKind.REQUEST or incident.action in _PLANNED_ACTIONS
    topic = Topic(
        name=incident.topic,
        event=Event.INCIDENT,
        level=HealthLevel.GREEN if is_planned else HealthLevel.AMBER,
        stage=Stage.OPEN if incident.next_round is None else Stage.UNDER_WAY,
        what=_sentence(f"{KIND_TEXTS[incident.kind]}: {incident.reason}"),
        began_unix_s=moments.began,
        ready_unix_s=moments.detected + (JUDGED_S if moments.halted is None else 0.0),
        hosts=incident.culprit_hosts,
        ranks=incident.culprit_ranks,
        step=incident.last_step,
        cost=cost_text(incident) or "no step completed since",
        runbook=next(iter(runbooks_of(incident)), ""),
        route=f"incidents/{incident.incident_id}",
    )
    if incident.state is IncidentState.OPEN:
        round_text = "" if incident.next_round is None else f" as round {incident.next_round}"
        return replace(
            topic,
            activity=f"the job responds with {incident.action} and continues by itself{round_text}",
            action=f"{NO_ACTION}; a second message comes when it trains again",
        )
    if incident.state is IncidentState.HELD:
        is_over = OVER_NOTE in incident.notes or not is_of_newest_round
        topic = replace(topic, cost="nothing: training continues", activity="no host is evicted")
        if not is_over:
            return replace(topic, stage=Stage.OPEN, action="check etcd and the network of these hosts")
        return _closed(topic, _number(incident.notes.get(OVER_NOTE, "")) or moments.detected, "the hold is over")
    if incident.state is IncidentState.STOPPED:
        return _closed(topic, moments.halted or moments.detected, "the job ended with this incident")
    since = "" if incident.resumed_step is None else f" since step {incident.resumed_step:,}"
    return _closed(topic, moments.first_step or moments.detected, f"the job trains again{since}")


def _closed(topic: Topic, ended_unix_s: float, activity: str) -> Topic:
    action = f"check {names_text(topic.hosts, most=4)} when there is time" if topic.hosts else NO_ACTION
    return replace(
        topic, stage=Stage.CLOSED, ended_unix_s=ended_unix_s, ready_unix_s=0.0, activity=activity, action=action
    )


def _of_verdict(job: str, outcome: VerdictOutcome, verdict: HostVerdict) -> Topic:
    return Topic(
        name=f"verdict/{outcome.verdict_id}",
        event=Event.VERDICT,
        level=HealthLevel.AMBER,
        stage=Stage.OPEN,
        what=_sentence(f"a verdict of the diagnosis {outcome.reason}"),
        began_unix_s=outcome.at_unix_s,
        ready_unix_s=outcome.at_unix_s,
        hosts=verdict.hosts,
        ranks=verdict.ranks,
        step=verdict.last_step,
        activity="the job continues unchanged until a person decides",
        action=f"decide: `megatrain job approve {job} --verdict {outcome.verdict_id}`, or `dismiss`",
        runbook="verdict.md",
        route="stragglers",
    )


def _of_end(end: JobEnd) -> Topic:
    is_expected = end.exit_code in (ExitCode.OK, ExitCode.SAVED_AND_STOPPED)
    return Topic(
        name=f"end/{end.created_unix_s:.3f}",
        event=Event.END,
        level=HealthLevel.GREEN if is_expected else HealthLevel.RED,
        stage=Stage.OPEN,
        what=_sentence(f"the job is over {exit_text(end.exit_code)}: {end.reason}"),
        began_unix_s=end.created_unix_s,
        ready_unix_s=end.created_unix_s,
        activity="nothing is running",
        action=NO_ACTION
        if is_expected
        else "fix the cause, then start the job again: it resumes from its newest checkpoint",
        runbook="" if is_expected else "stopped-by-the-brake.md",
        route="incidents",
    )


def _of_reason(reason: Reason, first_seen_s: float) -> Topic:
    began_s = first_seen_s if reason.since_unix_s is None else min(first_seen_s, reason.since_unix_s)
    is_of_restarts, settles_s = reason.code in _OF_RESTARTS, SETTLED_S if reason.code in _OFTEN_BRIEF else 0.0
    is_red = reason.level is HealthLevel.RED
    return Topic(
        # the restart budget leads to the restart limit: one topic, sent again when its level rises
        name="restarts" if is_of_restarts else f"health/{reason.code}",
        event=Event.RESTARTS if is_of_restarts else Event.HEALTH,
        level=reason.level,
        stage=Stage.OPEN,
        what=_sentence(reason.text),
        began_unix_s=began_s,
        ready_unix_s=first_seen_s + settles_s,
        hosts=reason.hosts,
        ranks=reason.ranks,
        action="follow the runbook now" if is_red else "follow the runbook today",
        runbook=reason.runbook,
        route="incidents" if is_of_restarts else "overview",
    )


def _sentence(text: str) -> str:
    return printable(short(text.rstrip(". "), _MAX_CHARS))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
