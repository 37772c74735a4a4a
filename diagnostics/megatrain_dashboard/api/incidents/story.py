"""Makes the story of an incident: its events, its notifications, and the possible actions. Pure functions.

The actions are those that make sense given the job's current state. The handler checks each action again.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.config import Config
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from megatrain.formatting import count_text, names_text, seconds_text
from megatrain_dashboard.actions.document import ActionKind
from megatrain_dashboard.api.incidents.document import (
    HappenedDocument,
    OfferedActionDocument,
    StoryDocument,
)
from megatrain_dashboard.sources.hosts import HostOf
from megatrain_job.failures.culprit import FailureRole, failures_by_role
from megatrain_job.jobs.incident_phrases import (
    KIND_TEXTS,
    cost_text,
    rank_and_end,
    receipt_text,
    runbooks_of,
    where_text,
)
from megatrain_job.jobs.snapshot import JobSnapshot
from megatrain_job.jobs.verdict_cases import VerdictWithOutcome

_MAX_ENDS = 8
"""The number of ended ranks that are listed one by one."""
_YOUNG_S = 30.0
_OF_HOSTS = (IncidentKind.FAILURE, IncidentKind.HANG, IncidentKind.HOST_LOST, IncidentKind.STRAGGLER)
_MAX_HOSTS = 4
"""A fault that affects more hosts is not a fault of the hosts."""

KindAndTarget = tuple[ActionKind, str]
"""Kind and target of an action."""


def story_document(
    incident: Incident,
    case: VerdictWithOutcome | None,
    host_of: HostOf,
    config: Config | None,
    snapshot: JobSnapshot | None,
    now_s: float,
) -> StoryDocument:
    """Return the story of an incident. `case`: the verdict that led to it."""
    happened = [
        *_ends(incident, host_of),
        *_verdict(case),
        *_moments(incident, has_verdict=case is not None and case.verdict is not None),
    ]
    order = {what: place for place, what in enumerate(("verdict", "fault", "noticed", "decision", "step", "over"))}
    receipts = [
        _at(
            receipt.at_unix_s,
            "not-notified" if receipt.problem else "notified",
            f"{receipt.receiver}: {receipt_text(receipt)}",
        )
        for receipt in incident.receipts
    ]
    return StoryDocument(
        incident_id=incident.incident_id,
        happened=tuple(sorted(happened, key=lambda event: (round(event.at_unix_s, 3), order[event.what]))),
        notifications=tuple(sorted(receipts, key=lambda receipt: receipt.at_unix_s)),
        why_not_notified="" if receipts else _why_not_notified(incident, config, now_s),
        actions=tuple(
            OfferedActionDocument(kind=kind, target=target) for kind, target in offered_actions(incident, snapshot)
        ),
        runbooks=runbooks_of(incident),
    )


def _at(at_unix_s: float, what: str, text: str) -> HappenedDocument:
    return HappenedDocument.model_validate({"at_unix_s": at_unix_s, "what": what, "text": text})


def _ends(incident: Incident, host_of: HostOf) -> Iterator[HappenedDocument]:
    """Yield how ranks ended: roots and causes first, then the ranks that followed. Further ranks share one entry."""
    hosts = {failure.rank: host_of(incident.round, failure.rank) for failure in incident.failures}
    ends = failures_by_role(incident, hosts)
    for role, failure in ends[:_MAX_ENDS]:
        text = rank_and_end(failure, hosts[failure.rank])
        text = f"{text}, because other ranks had ended" if role is FailureRole.FOLLOWS else text
        yield _at(failure.at_unix_s, "step" if role is FailureRole.FOLLOWS else "fault", text)
    rest = [failure.at_unix_s for _, failure in ends[_MAX_ENDS:]]
    if rest:
        yield _at(max(rest), "step", f"{count_text(len(rest), 'further rank')} had ended by then")


def _verdict(case: VerdictWithOutcome | None) -> Iterator[HappenedDocument]:
    if case is None or case.verdict is None:
        return
    verdict, outcome = case.verdict, case.outcome
    whom = names_text(verdict.hosts, most=4) or "the training itself"
    confidence = f", {verdict.confidence} confidence" if verdict.confidence else ""
    yield _at(verdict.created_unix_s, "verdict", f"the diagnosis named {whom}: {verdict.cause}{confidence}")
    if outcome is not None:
        by = f" by {outcome.by}" if outcome.by else ""
        yield _at(outcome.at_unix_s, "decision", f"the verdict was {_OUTCOMES.get(outcome.kind, outcome.kind)}{by}")


_OUTCOMES = {"acted": "acted on", "waiting": "left to a person", "dry-run": "not acted on: a dry run"}


def _moments(incident: Incident, *, has_verdict: bool) -> Iterator[HappenedDocument]:
    """Yield the moments that the driver recorded. `has_verdict`: the verdict already describes start and detection."""
    moments, rounds = incident.moments, f"round {incident.round}"
    where = where_text(incident.culprit_hosts, incident.culprit_ranks)
    if incident.kind is IncidentKind.LAUNCH_LOST:
        yield _at(moments.began, "fault", "the last sign of life of the previous launch")
        yield _at(
            moments.detected,
            "noticed",
            "the job was launched again and found no recorded end of the previous launch",
        )
    elif not has_verdict:
        if not incident.failures:
            yield _at(moments.began, "fault", f"{KIND_TEXTS[incident.kind]}{f': {where}' if where else ''}")
        after = moments.detected - moments.began
        by = f" of {incident.driver}" if incident.driver else ""
        yield _at(
            moments.detected, "noticed", f"the driver{by} noticed it, {seconds_text(max(0.0, after))} after it began"
        )
    if moments.halted is not None and incident.kind is not IncidentKind.LAUNCH_LOST:
        yield _at(moments.halted, "decision", f"all workers of {rounds} are gone; decided: {incident.action}")
    elif moments.decided is not None:
        yield _at(moments.decided, "decision", f"decided: {incident.action}")
    follows = "the next round" if incident.next_round is None else f"round {incident.next_round}"
    for moment, text in (
        (moments.round_written, f"{follows} was formed"),
        (moments.joined, f"the ranks of {follows} were connected"),
        (moments.loaded, f"the state was restored{_step_text(incident)}"),
    ):
        if moment is not None:
            yield _at(moment, "step", text)
    cost = cost_text(incident)
    if moments.first_step is not None:
        yield _at(moments.first_step, "over", f"a step was completed again{f': {cost}' if cost else ''}")
    elif incident.state is IncidentState.STOPPED:
        yield _at(moments.halted or moments.detected, "over", "the job ended with this incident")


def _step_text(incident: Incident) -> str:
    return "" if incident.resumed_step is None else f" as it was after step {incident.resumed_step:,}"


def _why_not_notified(incident: Incident, config: Config | None, now_s: float) -> str:
    """Return why no receiver was notified of an incident, as far as that is known."""
    if config is None:
        return "No notification is recorded, and the job's configuration is not known."
    if not config.receivers:
        return "The configuration has no receivers: no slack, pagerduty, email, alertmanager or webhook."
    listed = names_text(config.receivers)
    if incident.kind is IncidentKind.REQUEST or incident.action == "requeue":
        return f"Only receivers of level green are notified of planned actions ({listed})."
    if incident.state is IncidentState.OPEN and now_s - incident.moments.detected < _YOUNG_S:
        return f"Not notified yet: {listed}."
    return f"No notification is recorded: `events` or `level` of {listed} may leave this incident out."


def offered_actions(incident: Incident, snapshot: JobSnapshot | None) -> tuple[KindAndTarget, ...]:
    """Return kinds and targets of actions; none for a job that is over or recorded, or that has no round."""
    if snapshot is None or snapshot.end is not None or snapshot.newest_round is None:
        return ()
    return tuple(_offered(incident, snapshot))


def _offered(incident: Incident, snapshot: JobSnapshot) -> Iterator[KindAndTarget]:
    waiting = [outcome.verdict_id for outcome, _ in snapshot.waiting]
    if incident.verdict in waiting:
        yield "approve", incident.verdict
        yield "dismiss", incident.verdict
    if incident.state is IncidentState.HELD:
        # a checkpoint that is saved now is not lost if the control plane does not return
        yield "checkpoint", ""
    if incident.kind in _OF_HOSTS and len(incident.culprit_hosts) <= _MAX_HOSTS:
        for host in incident.culprit_hosts:
            yield from _of_host(host, snapshot, is_open=incident.state is IncidentState.OPEN)
    if incident.kind is IncidentKind.NUMERICS and incident.state is IncidentState.RECOVERED:
        yield "stop", ""


def _of_host(host: str, snapshot: JobSnapshot, *, is_open: bool) -> Iterator[KindAndTarget]:
    newest = snapshot.newest_round
    if host in snapshot.cordons:
        yield "uncordon", host
        return
    is_in_round = newest is not None and any(part.host == host for part in newest.hosts)
    if is_in_round and not is_open:
        yield "evict", host
    if is_in_round or host in snapshot.hosts:
        yield "cordon", host
