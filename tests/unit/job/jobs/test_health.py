"""The health of a job: a level and reasons, from invented snapshots. There is one row for each possible problem."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from megatrain.contracts.records.diag_records import DaemonReport, DeviceProblem, DeviceProblemKind
from megatrain.contracts.records.host_records import DiskSpace, HostPhase, HostSaves, HostStatus, Milestones
from megatrain.contracts.records.host_verdict import OutcomeKind, VerdictOutcome
from megatrain.contracts.records.incident import OVER_NOTE, IncidentKind, IncidentState, Moments
from megatrain.contracts.records.problem_reports import DriverReport, JobProblem
from megatrain.contracts.records.rounds import Halt, JobEnd
from megatrain_job.jobs.assessment import Unreachable, assess
from megatrain_job.jobs.health import Health, HealthLevel, Reason, ReasonCode, health_of
from megatrain_job.jobs.snapshot import JobSnapshot
from tests.helpers.launched_job import (
    NOW_S,
    make_cordon,
    make_failure,
    make_halt,
    make_host,
    make_incident,
    make_record,
    make_round,
    make_snapshot,
    make_stall,
    make_status,
)
from tests.helpers.source_tree import ROOT
from tests.helpers.written_verdicts import STRAGGLER

RUNBOOKS = ROOT / "docs" / "runbooks"
LIMITS = {"recovery.restarts_per_hour": "4", "recovery.restarts_without_progress": "3"}
EVERY_10_MIN = {"checkpoint.interval": "0", "checkpoint.interval_s": "600"}
OPEN = make_incident(
    "0002", state=IncidentState.OPEN, round=2, moments=Moments(NOW_S - 3, NOW_S - 2), reason="rank 1 was killed",
    culprit_hosts=("host-1",), culprit_ranks=(1,),
)  # fmt: skip
LOST = replace(OPEN, kind=IncidentKind.HOST_LOST, culprit_hosts=("host-2",), reason="host-2: its port refuses")


def saves(**reported: Any) -> HostSaves:
    return HostSaves(saved_step=1200, saved_unix_s=NOW_S - 60, num_bytes=10**9, **reported)


def statuses(*, number: int = 1, **changes: Any) -> Mapping[str, HostStatus]:
    """Return the statuses of a training job, with changes to those of one host."""
    before = make_snapshot().statuses
    return {**before, f"host-{number}": make_status(number, **changes)}


def reported(**changes: Any) -> Mapping[str, HostStatus]:
    return statuses(saves=saves(**changes))


def disk_space(free_gb: float, full_in_s: float | None = None) -> Mapping[str, HostStatus]:
    return statuses(disks=(DiskSpace("runs/demo", int(free_gb * 1e9), 10**12, full_in_s),), saves=saves())


def restarts(count: int, *, at_step: int | None = None) -> tuple[Any, ...]:
    """Return restarts within the hour, each after one more step than the previous one, or all after the same step."""
    return tuple(
        make_incident(f"{number:04d}", last_step=1000 + number if at_step is None else at_step)
        for number in range(count)
    )


def old(seconds: float, **status: Any) -> dict[str, Any]:
    """Return a job that has trained for long, with a newest checkpoint of this age."""
    began = Milestones(NOW_S - 9000, NOW_S - 9000, NOW_S - 9000, NOW_S - 9000)
    of_host = {
        "host-1": make_status(1, milestones=began, saves=replace(saves(), saved_unix_s=NOW_S - seconds), **status),
        "host-2": make_status(2, milestones=began),
    }
    return {"statuses": {**make_snapshot().statuses, **of_host}, "record": make_record(config=EVERY_10_MIN)}


def streamed(report: DaemonReport | None, session: str = "d1", **status: Any) -> dict[str, Any]:
    return {"statuses": statuses(is_streamed=True, **status), "daemon_session": session, "daemon_report": report}


def report(**changes: Any) -> DaemonReport:
    return replace(DaemonReport("d1", NOW_S - 2, newest_step_unix_s=NOW_S - 2), **changes)


GREEN = {
    "trains": {},
    "a cordoned host is no reason": {"cordons": {"host-7": make_cordon(7)}},
    "saves well": {"statuses": reported()},
    "has space": {"statuses": disk_space(500, 48 * 3600.0)},
    "a checkpoint is due soon": old(1200),
    "checkpoints come more seldom, for they cost much": old(2000, save_interval_s=1000.0),
    "of a run without a daemon": {"daemon_session": ""},
    "the daemon receives all": streamed(report()),
    "one restart": {"incidents": restarts(1), "record": make_record(config=LIMITS)},
    "restarts of an earlier launch": {"earlier_incidents": restarts(4), "record": make_record(config=LIMITS)},
    "first start": {
        "incidents": (), "statuses": {
            f"host-{number}": make_status(number, HostPhase.STARTING, min_step=None, max_step=None)
            for number in (1, 2)
        },
    },
    "finished": {"end": JobEnd(0, "all steps are done", NOW_S), "hosts": {}, "statuses": {}},
    "saved and stopped": {"end": JobEnd(75, "a stop was requested", NOW_S), "hosts": {}, "statuses": {}},
}  # fmt: skip


def test_job_without_problems_is_green() -> None:
    found = {name: assess(make_snapshot(**changes), NOW_S).health for name, changes in GREEN.items()}
    assert found == dict.fromkeys(GREEN, Health())


CASES: Mapping[str, tuple[ReasonCode, dict[str, Any], str]] = {
    "stuck": (ReasonCode.STUCK, {"statuses": statuses(number=2, stall=make_stall())}, "ranks 2-3 made no progress"),
    "a rank ended": (
        ReasonCode.BROKEN, {"statuses": statuses(phase=HostPhase.FAILED, failures=(make_failure(1),))},
        r"host-1: rank 1 was killed by SIGKILL \(9\)",
    ),
    "lease gone": (
        ReasonCode.HOST_LOST, {"hosts": {"host-1": make_host(1), "host-3": make_host(3)}},
        r"host-2 \(ranks 2-3\) is lost: its lease is gone, or the driver found it dead",
    ),
    "no executor": (ReasonCode.NOT_RUNNING, {"hosts": {}, "statuses": {}, "driver": ""}, "no executor is registered"),
    "failed": (ReasonCode.FAILED, {"end": JobEnd(66, "nothing to load", NOW_S)}, "exit code 66: nothing to load"),
    "restart limit": (
        ReasonCode.RESTART_LIMIT,
        {
            "end": JobEnd(1, "the 5th failure within an hour", NOW_S), "record": make_record(config=LIMITS),
            "incidents": (*restarts(4), make_incident("0009", state=IncidentState.STOPPED, action="stop")),
        },
        "exit code 1: the 5th failure",
    ),
    "restart limit is next": (
        ReasonCode.RESTART_LIMIT, {"incidents": restarts(4), "record": make_record(config=LIMITS)},
        "the next failure ends the job: 4 of 4 restarts within an hour",
    ),
    "hosts do not come": (
        ReasonCode.LATE,
        {
            "rounds": {}, "halts": {}, "statuses": {}, "incidents": (), "hosts": {"host-1": make_host(1)},
            "record": make_record(config={"recovery.join_timeout_s": "60"}),
        },
        r"waiting for hosts: 1 of at least 2 .*for longer than recovery.join_timeout_s=60",
    ),
    "recovery is late": (
        ReasonCode.LATE, {"halts": {2: make_halt(created_unix_s=NOW_S - 700)}, "incidents": (OPEN,)},
        "recovering, .* for longer than recovery.join_timeout_s=600",
    ),
    "saves fail": (
        ReasonCode.SAVES_FAIL, {"statuses": reported(num_failed=2, failing_unix_s=NOW_S - 30, error="disk full")},
        r"the last 2 checkpoints did not reach storage \(host-1\): disk full",
    ),
    "checkpoint too old": (
        ReasonCode.CHECKPOINT_OLD, old(3100), "that of step 1,200, 52 min ago, and one is due every 10 min",
    ),
    "etcd is out of space": (ReasonCode.ETCD_ALARM, {"etcd_alarms": ("NOSPACE",)}, "etcd raises NOSPACE"),
    "record lost": (ReasonCode.COORDINATION_LOST, {"record": None}, "no record of the job: its data were lost"),
    "files of its etcd removed": (
        ReasonCode.FILES_REMOVED, {"problems": (JobProblem("etcd", "/run/coordination was removed", NOW_S),)},
        "/run/coordination was removed",
    ),
    "recovering": (
        ReasonCode.RECOVERING, {"halts": {2: make_halt()}, "incidents": (OPEN,)},
        r"incident 20270115-0002 is open \(restart, now: decide\): rank 1 was killed",
    ),
    "a requested stop": (
        ReasonCode.REQUESTED,
        {
            "halts": {2: make_halt()},
            "incidents": (replace(OPEN, kind=IncidentKind.REQUEST, action="stop", reason="host-1 got SIGTERM"),),
        },
        r"is open \(stop, now: decide\): host-1 got SIGTERM",
    ),
    "a directory was removed": (
        ReasonCode.DIRECTORY_REMOVED,
        {"report": DriverReport("host-1", "trains", NOW_S, removed=("/run/logs was removed",))},
        "^/run/logs was removed",
    ),
    "the newest checkpoint is damaged": (
        ReasonCode.CHECKPOINT_DAMAGED,
        {"report": DriverReport("host-1", "trains", NOW_S, checkpoint_damage="step-000000020 is skipped: missing")},
        r"step-000000020 is skipped: missing; `megatrain job checkpoint` saves now",
    ),
    "an incident is open while it trains": (
        ReasonCode.RECOVERING, {"incidents": (OPEN,)}, r"is open \(restart, now: decide\): rank 1 was killed",
    ),
    "waits for hosts": (
        ReasonCode.WAITING_FOR_HOSTS,
        {
            "rounds": {}, "halts": {}, "statuses": {}, "incidents": (), "hosts": {"host-1": make_host(1)},
            "record": make_record(created_unix_s=NOW_S - 20),
        },
        "waiting for hosts: 1 of at least 2",
    ),
    "held": (
        ReasonCode.HELD, {"incidents": (make_incident(state=IncidentState.HELD, round=2, reason="2 leases vanished"),)},
        "hosts were held 12 min ago, and no host was evicted: 2 leases vanished",
    ),
    "a late step": (
        ReasonCode.STEP_LATE, {"statuses": statuses(last_step_unix_s=NOW_S - 50)},
        "no step was completed for 50 s, and a step takes 80 ms",
    ),
    "a snapshot waits for storage": (
        ReasonCode.SAVE_LATE,
        {
            "statuses": {
                f"host-{number}": make_status(number, last_step_unix_s=NOW_S - 50, step_phase="checkpoint")
                for number in (1, 2)
            }
        },
        "training waits in a snapshot until storage has an earlier one: no step was completed for 50 s, and a step",
    ),
    "one save failed": (
        ReasonCode.SAVE_FAILED, {"statuses": reported(num_failed=1, failing_unix_s=NOW_S - 3, error="timed out")},
        r"the last checkpoint did not reach storage; the next one will be tried \(host-1\): timed out",
    ),
    "a save is late": (ReasonCode.SAVE_LATE, old(1300), "22 min ago, and one is due every 10 min"),
    "a save is late by the interval in force": (
        ReasonCode.SAVE_LATE, old(2100, save_interval_s=1000.0), "35 min ago, and one is due every 17 min",
    ),
    "disk fills": (
        ReasonCode.DISK_FILLING, {"statuses": disk_space(500, 5 * 3600.0)},
        r"runs/demo will be full in 5 hours: 500 GB of 1 TB are free \(host-1\)",
    ),
    "disk is nearly full": (ReasonCode.DISK_FILLING, {"statuses": disk_space(1.5)}, "runs/demo is nearly full: 1.5 GB"),
    "disk is full": (ReasonCode.DISK_FILLING, {"statuses": disk_space(0.0, 0.0)}, "runs/demo is nearly full: 0 B"),
    "half of the restarts": (
        ReasonCode.RESTART_BUDGET, {"incidents": restarts(2), "record": make_record(config=LIMITS)},
        "2 of 4 restarts within an hour",
    ),
    "restarts lead nowhere": (
        ReasonCode.RESTART_BUDGET,
        {
            "incidents": restarts(2, at_step=1240),
            "record": make_record(config={**LIMITS, "recovery.restarts_per_hour": "20"}),
        },
        "2 of 3 restarts in a row have led to no new step",
    ),
    "verdict waits": (
        ReasonCode.VERDICT_WAITING,
        {"waiting": ((VerdictOutcome("v-1", OutcomeKind.WAITING, "waits", "host-1", NOW_S), STRAGGLER),)},
        "verdict v-1 waits .*megatrain job approve --verdict v-1",
    ),
    "verdict without an answer": (
        ReasonCode.VERDICT_UNANSWERED, {"unanswered": (replace(STRAGGLER, created_unix_s=NOW_S - 90),)},
        r"verdict v-1 on host-2 \(compute\) is 2 min old",
    ),
    "no daemon": (ReasonCode.DAEMON_SILENT, streamed(None, ""), "daemon does not run"),
    "the daemon hangs": (
        ReasonCode.DAEMON_SILENT, streamed(report(at_unix_s=NOW_S - 40)), "has not reported for 40 s: it hangs",
    ),
    "the daemon stores nothing": (
        ReasonCode.DAEMON_PROBLEM, streamed(report(problem="disk full")), "cannot store events: disk full",
    ),
    "a streamer is away": (
        ReasonCode.STREAMER_SILENT, streamed(report(away_hosts=("host-1",), num_away_hosts=1)),
        "events of host-1 do not reach",
    ),
    "metrics are behind": (
        ReasonCode.METRICS_SILENT, streamed(report(newest_step_unix_s=NOW_S - 200)), "are 3 min behind the steps",
    ),
    "ranks are silent": (
        ReasonCode.RANK_SILENT, streamed(report(silent_ranks="1-2", num_silent_ranks=2)), "no events of 2 ranks .*1-2",
    ),
    **{
        f"{kind} of a host that trains": (
            ReasonCode(kind.value),
            streamed(report(devices=(DeviceProblem(kind, "host-2", "GPU 3 of host-2 is lost", NOW_S - 9, (3,)),))),
            "^GPU 3 of host-2 is lost$",
        )
        for kind in DeviceProblemKind
    },
    "more devices than are named": (
        ReasonCode.GPU_DEGRADED, streamed(report(num_device_problems=40)), "40 more problems of GPUs and links",
    ),
    "no driver": (ReasonCode.NO_DRIVER, {"driver": ""}, "no driver is elected: .* until a host takes over"),
    "no host may be the driver": (
        ReasonCode.NO_DRIVER,
        {"driver": "", "hosts": {f"host-{n}": make_host(n, is_driver_candidate=False) for n in (1, 2)}},
        "no driver is elected: .* until `megatrain driver demo` runs",
    ),
    "the driver complains": (
        ReasonCode.DRIVER_ALARM, {"report": DriverReport("host-1", "trains", NOW_S, ("rounds/3 cannot be read",))},
        "the driver reports: rounds/3 cannot be read",
    ),
    "unfit spare": (
        ReasonCode.HOST_UNFIT,
        {"hosts": {**make_snapshot().hosts, "host-3": make_host(3, is_fit=False, unfit_reason="ECC errors")}},
        "host-3 is unfit: ECC errors",
    ),
    "problem of a host": (
        ReasonCode.HOST_PROBLEM, {"statuses": statuses(problem="logs cannot be written")},
        "host-1: logs cannot be written",
    ),
    "a damaged record": (ReasonCode.RECORD_UNREADABLE, {"unreadable": ("hosts/x: not JSON",)}, "hosts/x: not JSON"),
}  # fmt: skip


def test_each_problem_is_reported_with_its_code_and_level() -> None:
    for name, (code, changes, text) in CASES.items():
        health = assess(make_snapshot(**changes), NOW_S).health
        found = [reason for reason in health.reasons if reason.code is code]
        assert len(found) == 1, (name, health.reasons)
        assert re.search(text, found[0].text), (name, found[0].text)
        assert health.level is found[0].level, (name, health.reasons)


def test_hold_that_is_over_is_no_reason() -> None:
    over = make_incident(
        state=IncidentState.HELD, round=2, reason="2 leases vanished", notes={OVER_NOTE: f"{NOW_S:.3f}"}
    )
    assert assess(make_snapshot(incidents=(over,)), NOW_S).health.reasons == ()


def test_restart_budget_is_used_since_its_first_restart() -> None:
    first, second = restarts(2)
    second = replace(second, moments=Moments(NOW_S - 3, NOW_S - 2))
    record = make_record(config=LIMITS)
    (reason,) = assess(make_snapshot(incidents=(first, second), record=record), NOW_S).health.reasons
    assert (reason.code, reason.since_unix_s) == (ReasonCode.RESTART_BUDGET, first.moments.detected)


@pytest.mark.parametrize("missing", LIMITS)
def test_restart_limit_that_is_no_number_gives_no_reason(missing: str) -> None:
    record = make_record(config={**LIMITS, missing: "many"})
    assert assess(make_snapshot(incidents=restarts(4), record=record), NOW_S).health.reasons == ()


def test_every_code_is_in_the_table_and_has_its_page() -> None:
    known = {code for code, _, _ in CASES.values()} | {ReasonCode.UNREACHABLE}
    assert known == set(ReasonCode)
    page = (RUNBOOKS / "health.md").read_text()
    for code in ReasonCode:
        one = Reason(code, "")
        name, _, anchor = one.runbook.partition("#")
        assert (RUNBOOKS / name).is_file()
        assert not anchor or re.search(rf"^##+ {anchor.replace('-', ' ')}$", (RUNBOOKS / name).read_text(), re.M | re.I)
        assert f"| `{code}` | {one.level} |" in page, code
    assert len(re.findall(r"^\| `", page, re.M)) == len(ReasonCode)


def test_an_unreachable_etcd_is_red() -> None:
    health = assess(make_snapshot(), NOW_S, Unreachable("etcd is out of reach: refused", NOW_S - 9)).health
    (reason,) = health.reasons
    assert (health.level, reason.code, reason.since_unix_s) == (HealthLevel.RED, ReasonCode.UNREACHABLE, NOW_S - 9)


def test_the_red_reasons_come_first() -> None:
    amber, red = Reason(ReasonCode.SAVE_LATE, "late"), Reason(ReasonCode.STUCK, "stuck")
    health = health_of([amber, red, amber])
    assert (health.level, health.reasons) == (HealthLevel.RED, (red, amber, amber))
    assert Health().level is HealthLevel.GREEN


def dead_host(**changes: Any) -> JobSnapshot:
    """Return a job whose driver has found host-2 dead; its lease is valid for some more seconds."""
    return make_snapshot(incidents=(LOST,), halts={2: Halt(2, LOST.reason, False, NOW_S - 1)}, **changes)


def test_dead_host_is_shown_with_its_proof() -> None:
    snapshot = dead_host()
    answer = assess(snapshot, NOW_S)
    states = {view.host: (str(view.state), view.is_in_order) for view in answer.hosts}
    assert states["host-2"] == ("lost", False)
    assert any("its port refuses" in reason.text for reason in answer.health.reasons)
    # In the first seconds of the next round its lease may still exist: it is not a spare.
    later = dead_host(rounds={2: make_round(2), 3: make_round(3, hosts=(make_round().hosts[0],))})
    assert {view.host: str(view.state) for view in assess(later, NOW_S).hosts}["host-2"] == "gone"
    # Another session of it is a normal host.
    back = dead_host(hosts={**make_snapshot().hosts, "host-2": make_host(2, session="new")})
    assert {view.host: str(view.state) for view in assess(back, NOW_S).hosts}["host-2"] == "returned"


def test_storage_problem_is_reported_beside_a_recovery() -> None:
    changed = reported(num_failed=3, failing_unix_s=NOW_S - 60, error="disk full")
    health = assess(make_snapshot(statuses=changed, incidents=(OPEN,), halts={2: make_halt()}), NOW_S).health
    assert [reason.code for reason in health.reasons] == [ReasonCode.SAVES_FAIL, ReasonCode.RECOVERING]


def test_a_device_of_a_host_that_does_not_train_is_no_reason() -> None:
    problem = DeviceProblem(DeviceProblemKind.GPU_FAILING, "host-9", "GPU 3 of host-9 is lost")
    found = assess(make_snapshot(**streamed(report(devices=(problem,), num_device_problems=1))), NOW_S).health
    assert ReasonCode.GPU_FAILING not in {reason.code for reason in found.reasons}
