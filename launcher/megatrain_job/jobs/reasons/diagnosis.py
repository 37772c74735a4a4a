"""Reasons about observation: the diagnostics daemon, the hosts' streamers, and the data from the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.contracts.records.diag_records import DaemonReport
from megatrain.formatting import age_text, count_text, names_text
from megatrain_job.jobs.health import Reason, ReasonCode
from megatrain_job.jobs.job_state import JobActivity, JobState
from megatrain_job.jobs.snapshot import JobSnapshot

BEGIN_S = 30.0
"""Nothing is reported so early in a round: the daemon and the streamers start with the job, and restart within seconds
after an exit."""
REPORT_S = 5.0
"""The interval between two reports of the daemon."""
_SILENT_S = 30.0
_BEHIND_S = 60.0
_BEHIND_STEPS = 5.0


def reasons_of_diagnosis(snapshot: JobSnapshot, activity: JobActivity, now_s: float) -> Iterator[Reason]:
    """Yield the reasons that concern the diagnosis of the job. A job without streamers has no diagnosis."""
    is_streamed = any(view.status is not None and view.status.is_streamed for view in activity.members)
    began_s = _began(snapshot)
    if not is_streamed or not activity.is_live or now_s - began_s < BEGIN_S:
        return
    report = snapshot.daemon_report
    if not snapshot.daemon_session:
        since_s = began_s if report is None else report.at_unix_s
        text = "the diagnostics daemon does not run: nothing new is recorded, and stragglers are not found"
        yield Reason(ReasonCode.DAEMON_SILENT, text, since_s)
    elif report is not None and report.session == snapshot.daemon_session:
        yield from _of_report(report, activity, now_s)


def _of_report(report: DaemonReport, activity: JobActivity, now_s: float) -> Iterator[Reason]:
    if now_s - report.at_unix_s > _SILENT_S:
        text = f"the diagnostics daemon has not reported for {age_text(report.at_unix_s, now_s)}: it hangs"
        yield Reason(ReasonCode.DAEMON_SILENT, text, report.at_unix_s)
        return
    if report.problem:
        yield Reason(ReasonCode.DAEMON_PROBLEM, f"the diagnostics daemon cannot store events: {report.problem}")
    if report.num_away_hosts:
        names = names_text(report.away_hosts) if report.num_away_hosts <= len(report.away_hosts) else ""
        who = names or count_text(report.num_away_hosts, "host")
        text = f"events of {who} do not reach the diagnostics daemon: the streamer is not connected"
        yield Reason(ReasonCode.STREAMER_SILENT, text, None, report.away_hosts)
    if report.num_silent_ranks:
        who = count_text(report.num_silent_ranks, "rank")
        yield Reason(ReasonCode.RANK_SILENT, f"no events of {who} in the newest steps: {report.silent_ranks}")
    yield from _devices(report, activity)
    yield from _behind(report, activity)


def _devices(report: DaemonReport, activity: JobActivity) -> Iterator[Reason]:
    """Yield the problems of GPUs and links of the hosts that train; health checks cover the other hosts."""
    members = {view.host for view in activity.members}
    for device in report.devices:
        if device.host in members:
            yield Reason(ReasonCode(device.kind.value), device.text, device.since_unix_s, (device.host,), device.ranks)
    num_unlisted = report.num_device_problems - len(report.devices)
    if num_unlisted > 0:
        text = f"{count_text(num_unlisted, 'more problem')} of GPUs and links: see the pages of the hosts"
        yield Reason(ReasonCode.GPU_DEGRADED, text)


def _behind(report: DaemonReport, activity: JobActivity) -> Iterator[Reason]:
    """Yield the reason if hosts complete steps whose events do not arrive."""
    newest_s, streamed_s = activity.progress.last_step_unix_s, report.newest_step_unix_s
    if activity.state is not JobState.TRAINING or newest_s is None:
        return
    limit_s = max(_BEHIND_S, _BEHIND_STEPS * (activity.progress.median_step_s or 0.0))
    firsts = [view.status.milestones.first_step_unix_s for view in activity.members if view.status is not None]
    since_s = (
        streamed_s
        if streamed_s is not None
        else max((moment_s for moment_s in firsts if moment_s is not None), default=None)
    )
    if since_s is not None and newest_s - since_s > limit_s:
        text = f"loss, step times and other metrics are {age_text(since_s, newest_s)} behind the steps of the hosts"
        yield Reason(ReasonCode.METRICS_SILENT, text, since_s)


def _began(snapshot: JobSnapshot) -> float:
    newest = snapshot.newest_round
    created_s = 0.0 if snapshot.record is None else snapshot.record.created_unix_s
    return created_s if newest is None else max(created_s, newest.created_unix_s)
