"""The answer of `megatrain status` as lines and as JSON. The first line is the answer, the rest explains it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatrain.commands.printing import age_text, facts, short
from megatrain.contracts.incident import Incident, IncidentState
from megatrain.contracts.record import to_plain
from megatrain.contracts.texts import names_text
from megatrain_launcher.commands.assessment import OVER, Assessment, open_incident
from megatrain_launcher.commands.host_table import host_document, host_lines
from megatrain_launcher.commands.host_view import HostState, HostView
from megatrain_launcher.commands.incident_text import incident_document
from megatrain_launcher.commands.reader import JobSnapshot
from megatrain_launcher.commands.words import cost_text, current_phase

_MANY_HOSTS = 16
_MANY_PROBLEMS = 10
_NUM_INCIDENTS = 5


def status_lines(snapshot: JobSnapshot, answer: Assessment, now_s: float, *, is_all: bool = False) -> list[str]:
    """Return what people read."""
    since = "" if answer.since_unix_s is None else f" (for {age_text(answer.since_unix_s, now_s)})"
    health = "" if answer.state in OVER else "healthy, " if answer.is_healthy else "NOT HEALTHY, "
    lines = [f"{snapshot.job}: {health}{short(answer.headline, 400)}{since}"]
    problems = answer.problems if is_all else answer.problems[:_MANY_PROBLEMS]
    lines += [f"  {'!!' if problem.is_error else '! '} {short(problem.text, 400)}" for problem in problems]
    if len(problems) < len(answer.problems):
        lines.append(f"  ... and {len(answer.problems) - len(problems):,} more (--all shows them)")
    lines += ["", *facts(_facts(snapshot, answer, now_s))]
    shown = answer.hosts if is_all or len(answer.hosts) <= _MANY_HOSTS else _notable(answer.hosts)
    if shown:
        lines += ["", *host_lines(shown, now_s)]
    if len(shown) < len(answer.hosts):
        lines.append(f"and {len(answer.hosts) - len(shown):,} hosts in order (--all shows them)")
    return lines


def status_document(snapshot: JobSnapshot, answer: Assessment, now_s: float) -> dict[str, Any]:
    """Return what programs read."""
    newest, halt = snapshot.newest_round, snapshot.newest_halt
    progress = answer.progress
    return {
        "job": snapshot.job,
        "at_unix_s": now_s,
        "revision": snapshot.revision,
        "state": str(answer.state),
        "is_healthy": answer.is_healthy,
        "headline": answer.headline,
        "since_unix_s": answer.since_unix_s,
        "problems": [to_plain(problem) for problem in answer.problems],
        "step": progress.step,
        "max_step": progress.max_step,
        "last_step_unix_s": progress.last_step_unix_s,
        "median_step_s": progress.median_step_s,
        "driver": snapshot.driver or None,
        "driver_report": None if snapshot.report is None else to_plain(snapshot.report),
        "run_directory": None if snapshot.record is None else snapshot.record.run_directory,
        "min_hosts": None if snapshot.record is None else snapshot.record.min_hosts,
        "max_hosts": None if snapshot.record is None else snapshot.record.max_hosts,
        "round": None if newest is None else {
            "number": newest.number, "world_size": newest.world_size, "reason": newest.reason,
            "created_unix_s": newest.created_unix_s, "incident": newest.incident,
            "halt": None if halt is None else to_plain(halt),
        },
        "hosts": [host_document(view) for view in answer.hosts],
        "waiting_verdicts": [{"outcome": to_plain(one), "verdict": to_plain(two)} for one, two in snapshot.waiting],
        "effective_time_ratio": _time_ratio(snapshot),
        "incidents": [incident_document(one) for one in reversed(snapshot.incidents[-_NUM_INCIDENTS:])],
        "end": None if snapshot.end is None else to_plain(snapshot.end),
    }  # fmt: skip


def _notable(views: Sequence[HostView]) -> list[HostView]:
    found = [view for view in views if not view.is_in_order]
    return found[:_MANY_HOSTS]


def _facts(snapshot: JobSnapshot, answer: Assessment, now_s: float) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    newest = snapshot.newest_round
    if newest is not None:
        over = "over, " if snapshot.newest_halt is not None else ""
        text = f"{newest.number}, {over}began {age_text(newest.created_unix_s, now_s)} ago: {short(newest.reason)}"
        found.append(("round", text))
    if snapshot.hosts:
        found.append(("driver", _driver_fact(snapshot, now_s)))
    spares = [view.host for view in answer.hosts if view.state == HostState.SPARE]
    if spares:
        found.append(("spares", names_text(spares)))
    if snapshot.incidents:
        found.append(_incident_fact(open_incident(snapshot) or snapshot.incidents[-1], now_s))
    ratio = _time_ratio(snapshot)
    if ratio is not None:
        found.append(("training time", f"{ratio:.1%} of the job's time"))
    if snapshot.record is not None:
        found.append(("run", snapshot.record.run_directory))
    return found or [("hosts", "none")]


def _driver_fact(snapshot: JobSnapshot, now_s: float) -> str:
    report = snapshot.report
    if report is None:
        return snapshot.driver or "none"
    return f"{report.driver}, for {age_text(report.since_unix_s, now_s)}: {short(report.reason, 400)}"


def _incident_fact(incident: Incident, now_s: float) -> tuple[str, str]:
    cost = cost_text(incident)
    if incident.state is IncidentState.OPEN:
        phase = current_phase(incident)
        cost = f"now: {phase}" if phase else ""
    did = f"{incident.action}{f' ({cost})' if cost else ''}"
    age = age_text(incident.moments.began, now_s)
    text = f"{incident.incident_id}, {age} ago, {incident.state}, {did}: {short(incident.reason)}"
    return ("incident" if incident.state is IncidentState.OPEN else "last incident", text)


def _time_ratio(snapshot: JobSnapshot) -> float | None:
    known = [one.effective_time_ratio for one in snapshot.incidents if one.effective_time_ratio is not None]
    return known[-1] if known else None
