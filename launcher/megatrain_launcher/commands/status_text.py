"""Formats the output of `megatrain status`: the first line is the answer, the others explain it.

`megatrain host` also prints the table of hosts and the results of health checks. Pure functions: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from megatrain.commands.printing import facts, table
from megatrain.contracts.network_address import is_loopback
from megatrain.contracts.records.host_records import CheckOutcome, CheckReport
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain.formatting import age_text, count_text, names_text, ranges_text, seconds_text, short
from megatrain_job.jobs.assessment import Assessment
from megatrain_job.jobs.health import HealthLevel, Reason
from megatrain_job.jobs.host_view import HostState, HostView
from megatrain_job.jobs.incident_phrases import cost_text, current_phase
from megatrain_job.jobs.job_state import open_incident
from megatrain_job.jobs.snapshot import JobSnapshot

_COLUMNS = ("host", "state", "ranks", "step", "step time", "last step", "")
_MAX_REMARK_CHARS = 160

MANY_HOSTS = 16
MANY_REASONS = 10
_MARKS = {HealthLevel.RED: "!!", HealthLevel.AMBER: "! "}


def host_lines(views: Sequence[HostView], now_s: float) -> list[str]:
    """Return a table with a line for each host."""
    return table([_COLUMNS, *(_row(view, now_s) for view in views)], left=(0, 1, 2, 6))


def _row(view: HostView, now_s: float) -> tuple[str, ...]:
    status = view.status
    step = median = last = "-"
    if status is not None and view.part is not None:
        step = _steps(status.min_step, status.max_step)
        median = "-" if status.median_step_s is None else seconds_text(status.median_step_s)
        last = "-" if status.last_step_unix_s is None else f"{age_text(status.last_step_unix_s, now_s)} ago"
    remark = "; ".join(text for text in ("driver" if view.is_driver else "", view.remark) if text)
    return (
        view.host, str(view.state), ranges_text(view.ranks) or "-", step, median, last, short(remark, _MAX_REMARK_CHARS)
    )  # fmt: skip


def _steps(least: int | None, most: int | None) -> str:
    if least is None:
        return "-"
    return f"{least:,}" if most is None or most == least else f"{least:,}-{most:,}"


def check_lines(reports: Sequence[CheckReport]) -> list[str]:
    """Return the findings of health checks: a line for each host, and below it the checks that it did not pass."""
    lines: list[str] = []
    for report in reports:
        counts = {outcome: sum(result.outcome is outcome for result in report.results) for outcome in CheckOutcome}
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "nothing was checked"
        lines.append(f"{report.host}: {'fit' if report.is_fit else 'NOT FIT'}: {summary}")
        worth_a_line = [result for result in report.results if result.outcome is not CheckOutcome.PASSED]
        if worth_a_line:
            rows = [(f"  {result.name}", str(result.outcome), short(result.detail)) for result in worth_a_line]
            lines += table(rows, left=(0, 1, 2))
    return lines


def status_lines(snapshot: JobSnapshot, answer: Assessment, now_s: float, *, is_all: bool = False) -> list[str]:
    """Return the state of a job as lines for people."""
    since = "" if answer.since_unix_s is None else f" (for {age_text(answer.since_unix_s, now_s)})"
    level = answer.health.level
    lines = [f"{snapshot.job}: {level}, {short(answer.headline, 400)}{since}"]
    reasons = answer.health.reasons if is_all else answer.health.reasons[:MANY_REASONS]
    lines += [_reason_line(reason, now_s) for reason in reasons]
    if len(reasons) < len(answer.health.reasons):
        lines.append(f"  ... and {len(answer.health.reasons) - len(reasons):,} more (--all shows them)")
    lines += ["", *facts(_facts(snapshot, answer, now_s))]
    shown = answer.hosts if is_all or len(answer.hosts) <= MANY_HOSTS else _notable(answer.hosts)
    if shown:
        lines += ["", *host_lines(shown, now_s)]
    if len(shown) < len(answer.hosts):
        lines.append(f"and {count_text(len(answer.hosts) - len(shown), 'more host')} (--all shows all hosts)")
    return lines


def _reason_line(reason: Reason, now_s: float) -> str:
    since = "" if reason.since_unix_s is None else f" (for {age_text(reason.since_unix_s, now_s)})"
    return f"  {_MARKS[reason.level]} {reason.code}: {short(reason.text, 400)}{since}"


def _notable(views: Sequence[HostView]) -> list[HostView]:
    found = [view for view in views if not view.is_in_order]
    return found[:MANY_HOSTS]


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
    ratio = snapshot.effective_time_ratio
    if ratio is not None:
        found.append(("training time", f"{ratio:.1%} of the job's time until its last incident"))
    if snapshot.record is not None:
        found.append(("run", snapshot.record.run_directory))
    if snapshot.dashboard_url:
        found.append(("dashboard", _page_fact(snapshot)))
    return found or [("hosts", "none")]


def _page_fact(snapshot: JobSnapshot) -> str:
    """Return the page's address; for a job of several hosts also its machine, if no other machine can reach it."""
    url, host = snapshot.dashboard_url, snapshot.dashboard_host
    parts = urlsplit(url)
    has_others = snapshot.record is not None and snapshot.record.max_hosts > 1
    if not host or not has_others or not is_loopback(parts.hostname or ""):
        return url
    return f"{url}, only on {host}; from elsewhere: ssh -L {parts.port}:{parts.netloc} {host}"


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
