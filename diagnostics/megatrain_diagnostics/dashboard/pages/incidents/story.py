"""What happened in an incident, in order of time, and who was notified of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.config import Config
from megatrain.contracts.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.texts import count_text, names_text, seconds_text
from megatrain.failures.culprit import Role, failures_by_role
from megatrain.jobs.runbooks import runbooks_of
from megatrain.jobs.snapshot import JobSnapshot
from megatrain.jobs.verdict_cases import Case
from megatrain.jobs.words import KIND_TEXTS, cost_text, rank_and_end, told_text, where_text
from megatrain_diagnostics.dashboard.pages.incidents.document import (
    HappenedDocument,
    SensibleActionDocument,
    StoryDocument,
)
from megatrain_diagnostics.dashboard.pages.incidents.sensible import sensible_actions
from megatrain_diagnostics.dashboard.sources.host_names import HostOf

_MOST_ENDS = 8
"""Ends of ranks that are listed one by one."""
_YOUNG_S = 30.0


def story_document(
    incident: Incident,
    case: Case | None,
    host_of: HostOf,
    config: Config | None,
    snapshot: JobSnapshot | None,
    now_s: float,
) -> StoryDocument:
    """Return the story of an incident. `case`: the verdict that it follows from."""
    happened = [
        *_ends(incident, host_of),
        *_verdict(case),
        *_moments(incident, is_accused=case is not None and case.verdict is not None),
    ]
    order = {what: place for place, what in enumerate(("verdict", "fault", "noticed", "decision", "step", "over"))}
    told = [
        _at(one.at_unix_s, "not-told" if one.trouble else "told", f"{one.receiver}: {told_text(one)}")
        for one in incident.receipts
    ]
    return StoryDocument(
        incident_id=incident.incident_id,
        happened=tuple(sorted(happened, key=lambda one: (round(one.at_unix_s, 3), order[one.what]))),
        told=tuple(sorted(told, key=lambda one: one.at_unix_s)),
        why_not_told="" if told else _why_not_told(incident, config, now_s),
        actions=tuple(
            SensibleActionDocument(kind=kind, target=target) for kind, target in sensible_actions(incident, snapshot)
        ),
        runbooks=runbooks_of(incident),
    )


def _at(at_unix_s: float, what: str, text: str) -> HappenedDocument:
    return HappenedDocument.model_validate({"at_unix_s": at_unix_s, "what": what, "text": text})


def _ends(incident: Incident, host_of: HostOf) -> Iterator[HappenedDocument]:
    """Yield how ranks ended: each root and cause, then those that followed, together where they are many."""
    hosts = {one.rank: host_of(incident.round, one.rank) for one in incident.failures}
    ends = failures_by_role(incident, hosts)
    for role, failure in ends[:_MOST_ENDS]:
        text = rank_and_end(failure, hosts[failure.rank])
        text = f"{text}, because others had" if role is Role.FOLLOWS else text
        yield _at(failure.at_unix_s, "step" if role is Role.FOLLOWS else "fault", text)
    rest = [failure.at_unix_s for _, failure in ends[_MOST_ENDS:]]
    if rest:
        yield _at(max(rest), "step", f"{count_text(len(rest), 'further rank')} had ended by then")


def _verdict(case: Case | None) -> Iterator[HappenedDocument]:
    if case is None or case.verdict is None:
        return
    verdict, outcome = case.verdict, case.outcome
    whom = names_text(verdict.hosts, most=4) or "the training itself"
    confidence = f", {verdict.confidence} confidence" if verdict.confidence else ""
    yield _at(verdict.created_unix_s, "verdict", f"the diagnosis accused {whom}: {verdict.cause}{confidence}")
    if outcome is not None:
        by = f" by {outcome.by}" if outcome.by else ""
        yield _at(outcome.at_unix_s, "decision", f"the verdict was {_OUTCOMES.get(outcome.kind, outcome.kind)}{by}")


_OUTCOMES = {"acted": "acted on", "waiting": "left to a person", "dry-run": "not acted on: a dry run"}


def _moments(incident: Incident, *, is_accused: bool) -> Iterator[HappenedDocument]:
    """Yield the moments of the driver. `is_accused`: the verdict tells how it began, and who noticed."""
    moments, rounds = incident.moments, f"round {incident.round}"
    where = where_text(incident)
    if incident.kind is IncidentKind.LAUNCH_LOST:
        yield _at(moments.began, "fault", "the last sign of life of the launch before")
        yield _at(
            moments.detected, "noticed", "the job was launched again, and found that the launch before had no end"
        )
    elif not is_accused:
        if not incident.failures:
            yield _at(moments.began, "fault", f"{KIND_TEXTS[incident.kind]}{f': {where}' if where else ''}")
        after = moments.detected - moments.began
        by = f" of {incident.driver}" if incident.driver else ""
        yield _at(moments.detected, "noticed", f"the driver{by} knew, {seconds_text(max(0.0, after))} after it began")
    if moments.halted is not None and incident.kind is not IncidentKind.LAUNCH_LOST:
        yield _at(moments.halted, "decision", f"all workers of {rounds} are gone; decided: {incident.action}")
    elif moments.decided is not None:
        yield _at(moments.decided, "decision", f"decided: {incident.action}")
    follows = "the next round" if incident.next_round is None else f"round {incident.next_round}"
    for moment, text in (
        (moments.round_written, f"{follows} was formed"),
        (moments.joined, f"the ranks of {follows} had met"),
        (moments.loaded, f"the state was restored{_step_text(incident)}"),
    ):
        if moment is not None:
            yield _at(moment, "step", text)
    cost = cost_text(incident)
    if moments.first_step is not None:
        yield _at(moments.first_step, "over", f"a step was completed again{f': {cost}' if cost else ''}")
    elif incident.state is IncidentState.STOPPED:
        yield _at(moments.halted or moments.detected, "over", "the job ended with it")


def _step_text(incident: Incident) -> str:
    return "" if incident.resumed_step is None else f" as it was after step {incident.resumed_step:,}"


def _why_not_told(incident: Incident, config: Config | None, now_s: float) -> str:
    """Return why no receiver has heard of an incident, as far as anybody can tell."""
    if config is None:
        return "Nothing is recorded, and the job's configuration is not known."
    if not config.receivers:
        return "The configuration names nobody who is told: no slack, pagerduty, email, alertmanager or webhook."
    listed = names_text(config.receivers)
    if incident.kind is IncidentKind.REQUEST or incident.action == "requeue":
        return f"What was planned is told only to receivers of level green ({listed})."
    if incident.state is IncidentState.OPEN and now_s - incident.moments.detected < _YOUNG_S:
        return f"Not yet: {listed}."
    return (
        f"Nothing is recorded: {listed} may leave incidents out (`events`, `level`), or were told by an older version."
    )
