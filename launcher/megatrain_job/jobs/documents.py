"""A job, its hosts, incidents and checks in JSON form: the same in every subcommand and on the dashboard."""

from __future__ import annotations

from typing import Any

from megatrain.contracts.records.host_records import CheckReport
from megatrain.contracts.records.incident import Incident, phase_seconds
from megatrain.contracts.records.record import to_plain
from megatrain_job.jobs.assessment import Assessment
from megatrain_job.jobs.health import Health
from megatrain_job.jobs.host_view import HostView
from megatrain_job.jobs.incident_phrases import down_s
from megatrain_job.jobs.snapshot import JobSnapshot

_NUM_INCIDENTS = 5


def status_document(snapshot: JobSnapshot, answer: Assessment, now_s: float) -> dict[str, Any]:
    """Return the state of a job in JSON form, for programs."""
    newest, halt = snapshot.newest_round, snapshot.newest_halt
    progress = answer.progress
    return {
        "job": snapshot.job,
        "at_unix_s": now_s,
        "revision": snapshot.revision,
        "state": str(answer.state),
        "health": health_document(answer.health),
        "headline": answer.headline,
        "since_unix_s": answer.since_unix_s,
        "step": progress.step,
        "max_step": progress.max_step,
        "last_step_unix_s": progress.last_step_unix_s,
        "median_step_s": progress.median_step_s,
        "driver": snapshot.driver or None,
        "driver_report": None if snapshot.report is None else to_plain(snapshot.report),
        "dashboard_url": snapshot.dashboard_url or None,
        "dashboard_host": snapshot.dashboard_host or None,
        "run_directory": None if snapshot.record is None else snapshot.record.run_directory,
        "min_hosts": None if snapshot.record is None else snapshot.record.min_hosts,
        "max_hosts": None if snapshot.record is None else snapshot.record.max_hosts,
        "round": None if newest is None else {
            "number": newest.number, "world_size": newest.world_size, "reason": newest.reason,
            "created_unix_s": newest.created_unix_s, "incident": newest.incident,
            "halt": None if halt is None else to_plain(halt),
        },
        "hosts": [host_document(view) for view in answer.hosts],
        "waiting_verdicts": [
            {"outcome": to_plain(outcome), "verdict": to_plain(verdict)} for outcome, verdict in snapshot.waiting
        ],
        "effective_time_ratio": snapshot.effective_time_ratio,
        "incidents": [incident_document(incident) for incident in reversed(snapshot.incidents[-_NUM_INCIDENTS:])],
        "end": None if snapshot.end is None else to_plain(snapshot.end),
    }  # fmt: skip


def health_document(health: Health) -> dict[str, Any]:
    """Return a health in JSON form: the red reasons first."""
    return {
        "level": str(health.level),
        "reasons": [
            {**to_plain(reason), "level": str(reason.level), "runbook": reason.runbook} for reason in health.reasons
        ],
    }


def host_document(view: HostView) -> dict[str, Any]:
    """Return a host in JSON form."""
    record, status, part = view.record, view.status, view.part
    return {
        "host": view.host,
        "state": str(view.state),
        "is_registered": record is not None,
        "is_in_order": view.is_in_order,
        "is_driver": view.is_driver,
        "remark": view.remark,
        "first_rank": None if part is None else part.first_rank,
        "num_workers": None if part is None else part.num_workers,
        "cordon": None if view.cordon is None else to_plain(view.cordon),
        "record": None if record is None else to_plain(record),
        "status": None if status is None else to_plain(status),
    }


def incident_document(incident: Incident) -> dict[str, Any]:
    """Return an incident in JSON form, with the seconds of each phase."""
    return {
        **to_plain(incident),
        "phase_seconds": phase_seconds(incident.moments),
        "down_s": down_s(incident),
        "steps_lost": incident.steps_lost,
    }


def check_document(report: CheckReport) -> dict[str, Any]:
    """Return a check report in JSON form."""
    return {**to_plain(report), "is_fit": report.is_fit}
