"""Records of an invented job: two hosts with two ranks each that train, a spare, and a closed incident."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatrain.contracts.records.host_records import (
    HostPhase,
    HostRecord,
    HostStatus,
    Milestones,
    RankFailure,
    Stall,
)
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState, Moments
from megatrain.contracts.records.rounds import Cordon, Halt, JobRecord, Round, RoundHost
from megatrain_job.jobs.snapshot import JobSnapshot

NOW_S = 1_800_000_000.0
NUM_WORKERS = 2


def make_record(**changes: Any) -> JobRecord:
    record = JobRecord(
        job="demo", launch_id="l1", config_hash="c0ffee", config={"train.steps": "100"}, min_hosts=2, max_hosts=2,
        num_workers=NUM_WORKERS, run_directory="runs/demo", first_host="host-1", created_unix_s=NOW_S - 3600,
    )  # fmt: skip
    return replace(record, **changes)


def make_host(number: int, **changes: Any) -> HostRecord:
    record = HostRecord(
        host=f"host-{number}", session=f"s{number}", pid=100 + number, address=f"10.0.0.{number}", store_port=29400,
        liveness_port=29500, num_workers=NUM_WORKERS, config_hash="c0ffee", version="0.1.0", hardware="2 cores",
        joined_unix_s=NOW_S - 3600, is_fit=True, labels={"switch": "s1"},
    )  # fmt: skip
    return replace(record, **changes)


def make_status(number: int, phase: HostPhase = HostPhase.RUNNING, **changes: Any) -> HostStatus:
    status = HostStatus(
        host=f"host-{number}", session=f"s{number}", phase=phase, round=2, alive_ranks="3", min_step=1240,
        max_step=1240, resumed_step=1230, last_step_unix_s=NOW_S - 1, median_step_s=0.08, step_phase="step",
        milestones=Milestones(NOW_S - 700, NOW_S - 699, NOW_S - 698, NOW_S - 697),
    )  # fmt: skip
    return replace(status, **changes)


def make_round(number: int = 2, **changes: Any) -> Round:
    parts = tuple(
        RoundHost(f"host-{host}", f"s{host}", f"10.0.0.{host}", (host - 1) * NUM_WORKERS, NUM_WORKERS)
        for host in (1, 2)
    )
    found = Round(
        number=number, world_size=4, hosts=parts, store_address="10.0.0.1", store_port=29400,
        reason="rank 3 on host-2 was killed by SIGKILL (9)", driver="host-1", created_unix_s=NOW_S - 700,
    )  # fmt: skip
    return replace(found, **changes)


def make_failure(rank: int = 3, exit_code: int = -9, **changes: Any) -> RankFailure:
    return replace(RankFailure(rank, exit_code, NOW_S - 703.1), **changes)


def make_incident(name: str = "0001", **changes: Any) -> Incident:
    began = NOW_S - 703.2
    incident = Incident(
        incident_id=f"20270115-{name}", kind=IncidentKind.FAILURE, state=IncidentState.RECOVERED, round=1,
        moments=Moments(*(began + later_s for later_s in (0.0, 0.1, 0.15, 0.4, 0.5, 1.9, 2.3, 3.2))),
        reason="rank 3 on host-2 was killed by SIGKILL (9)", action="restart",
        culprit_hosts=("host-2",), culprit_ranks=(3,),
        confidence="certain", evidence=("rank 3 ended first, by SIGKILL (9)", "ranks 0-2 lost their connection to it"),
        failures=(make_failure(), make_failure(1, 69, at_unix_s=NOW_S - 702.9, label="network", action="none",
                                               is_cascade=True, line="connection reset by peer")),
        label="unknown", next_round=2, last_step=1234, resumed_step=1230, driver="host-1", effective_time_ratio=0.991,
    )  # fmt: skip
    return replace(incident, **changes)


def make_halt(**changes: Any) -> Halt:
    return replace(Halt(2, "rank 1 on host-1 was killed by SIGKILL (9)", False, NOW_S - 2, "20270115-0002"), **changes)


def make_stall(**changes: Any) -> Stall:
    return replace(Stall("step", 1240, 6.0, 5.0, NOW_S - 1, (2, 3)), **changes)


def make_cordon(number: int) -> Cordon:
    return Cordon(f"host-{number}", "ECC errors", "ops@login", NOW_S - 60)


def make_snapshot(**changes: Any) -> JobSnapshot:
    """Return a training job; changes replace whole fields."""
    snapshot = JobSnapshot(
        job="demo",
        revision=100,
        record=make_record(),
        hosts={f"host-{number}": make_host(number) for number in (1, 2, 3)},
        statuses={
            "host-1": make_status(1),
            "host-2": make_status(2),
            "host-3": HostStatus("host-3", "s3", HostPhase.PARKED),
        },
        rounds={1: make_round(1), 2: make_round(2)},
        halts={1: Halt(1, "rank 3 on host-2 was killed by SIGKILL (9)", False, NOW_S - 703)},
        incidents=(make_incident(),),
        driver="host-1",
    )
    return replace(snapshot, **changes)
