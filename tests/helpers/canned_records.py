"""Responses of the dashboard's API about incidents, verdicts, audit and checkpoints of the job of canned_job.py."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain_dashboard.api.audit import AuditDocument, AuditEntryDocument
from megatrain_dashboard.api.checkpoints import BranchDocument, CheckpointDocument, CheckpointsDocument
from megatrain_dashboard.api.incidents.document import (
    DamagedIncidentDocument,
    FailureDocument,
    HappenedDocument,
    IncidentDocument,
    IncidentLineDocument,
    IncidentLogsDocument,
    IncidentsDocument,
    OfferedActionDocument,
    PhaseDocument,
    StoryDocument,
    VerdictDocument,
)
from megatrain_dashboard.api.runbooks.document import RunbookDocument, RunbookNameDocument, RunbooksDocument
from megatrain_dashboard.api.runbooks.filling import Names
from megatrain_dashboard.api.runbooks.route import installed_runbooks
from megatrain_dashboard.responses.document import Document
from tests.helpers.canned_job import JOB, LOST_HOST, MARKUP, NOW_S, SLOW_HOST, STEP


def incidents() -> tuple[IncidentDocument, ...]:
    """Return three incidents, the newest first."""
    return (_incident_of_host(), _incident_of_straggler(), _incident_of_worker())


def _phases(*seconds: float | None, began_s: float) -> tuple[PhaseDocument, ...]:
    names = ("detect", "decide", "stop", "rendezvous", "load", "first_step")
    phases, at_s = [], began_s
    for name, took_s in zip(names, seconds, strict=True):
        phases.append(PhaseDocument(name=name, began_unix_s=at_s, seconds=took_s))
        at_s += took_s or 0.0
    return tuple(phases)


def _incident_of_host() -> IncidentDocument:
    began_s = NOW_S - 41
    return IncidentDocument(
        incident_id="000003", kind="host-lost", kind_text="a host was lost", state="open", round=2, next_round=3,
        began_unix_s=began_s, detected_unix_s=began_s + 10.4,
        reason=f"the lease of {LOST_HOST} ended and its ranks make no progress", action="restart with a spare",
        hosts=(LOST_HOST,), ranks=tuple(range(248, 256)), confidence="",
        evidence=(f"{LOST_HOST}: no heartbeat for 10 s", "376 ranks wait in grads-reduce-scatter of step 48,231"),
        failures=(), phases=_phases(10.4, 0.3, 6.1, None, None, None, began_s=began_s), down_s=None, last_step=48_230,
        resumed_step=None, steps_lost=None, effective_time_ratio=None, verdict_id="", driver="host-000", notes={},
    )  # fmt: skip


def _incident_of_straggler() -> IncidentDocument:
    began_s = NOW_S - 30_164
    return IncidentDocument(
        incident_id="000002", kind="straggler", kind_text="hosts made the job slow", state="recovered", round=1,
        next_round=2, began_unix_s=began_s, detected_unix_s=began_s + 0.2,
        reason="host-044 was evicted: slow device, 1.3 s of each step", action="evict and restart", hosts=("host-044",),
        ranks=tuple(range(352, 360)), confidence="high",
        evidence=(
            "forward-compute 1.31 times as long as that of 47 hosts that do the same work, in 58 of 60 steps",
            "shortest wait of all in grads-reduce-scatter", f"asked for by alice: {MARKUP}",
        ),
        failures=(), phases=_phases(0.2, 1.1, 9.4, 14.2, 118.7, 20.4, began_s=began_s), down_s=164.0, last_step=31_000,
        resumed_step=30_800, steps_lost=200, effective_time_ratio=0.951, verdict_id="v-000009", driver="host-000",
        notes={"approved_by": "alice"},
    )  # fmt: skip


def _incident_of_worker() -> IncidentDocument:
    began_s = NOW_S - 71_000
    failures = (
        FailureDocument(
            rank=91, host="host-011", exit_text="with exit code 1", label="cuda-ecc", action="replace the host",
            is_cascade=False, culprit="host-011", line=f"CUDA error: uncorrectable ECC error encountered {MARKUP}",
            at_unix_s=began_s,
        ),
        *(
            FailureDocument(
                rank=rank,
                host="host-012",
                exit_text="by SIGABRT (6)",
                label="nccl-remote",
                action="restart",
                is_cascade=True,
                culprit="",
                line="NCCL error: remote process exited or there was a network error",
                at_unix_s=began_s + 2.5,
            )
            for rank in range(96, 104)
        ),
    )  # fmt: skip
    return IncidentDocument(
        incident_id="000001", kind="failure", kind_text="a worker ended", state="recovered", round=1, next_round=1,
        began_unix_s=began_s, detected_unix_s=began_s + 1.9,
        reason="rank 91 ended with exit code 1: cuda-ecc, which names host-011", action="replace host-011",
        hosts=("host-011",), ranks=(91,), confidence="high", evidence=("the log of rank 91 names the device",),
        failures=failures, phases=_phases(1.9, 0.4, 5.0, 16.0, 121.0, 19.8, began_s=began_s), down_s=164.1,
        last_step=12_418, resumed_step=12_400, steps_lost=18, effective_time_ratio=0.972, verdict_id="",
        driver="host-000", notes={},
    )  # fmt: skip


def verdicts() -> tuple[VerdictDocument, ...]:
    """Return a verdict that waits for a person, and one that was executed."""
    return tuple(
        VerdictDocument(
            verdict_id=verdict_id,
            kind="straggler",
            cause="slow-device",
            confidence="high",
            round=round_,
            created_unix_s=at_s,
            hosts=(name,),
            ranks=tuple(range(first, first + 8)),
            evidence=(
                f"forward-compute of {name} takes 1.18 times as long as that of its peers",
                "it waits shortest for all others",
            ),
            first_step=48_010,
            last_step=48_230,
            step_s=6.34,
            gain_s_per_step=0.36,
            outcome=outcome,
            outcome_reason='diagnostics.eviction is "propose": a person decides',
            outcome_by="host-000",
            outcome_unix_s=at_s + 1,
            gain_s=25_800.0,
            cost_s=164.0,
            incident_id=incident_id,
        )
        for verdict_id, round_, name, first, at_s, outcome, incident_id in (
            ("v-000017", 2, SLOW_HOST, 136, NOW_S - 600, "waiting", ""),
            ("v-000009", 1, "host-044", 352, NOW_S - 30_200, "acted", "000002"),
        )
    )


def audit() -> AuditDocument:
    return AuditDocument(
        entries=(
            AuditEntryDocument(
                at_unix_s=NOW_S - 600, source="driver", actor="host-000", action="evict", target=SLOW_HOST,
                reason="a person decides", result="waiting", entry_hash="",
            ),
            AuditEntryDocument(
                at_unix_s=NOW_S - 30_164, source="dashboard", actor="operator at 127.0.0.1", action="approve",
                target="v-000009", reason=f"confirmed with the vendor {MARKUP}", result="accepted",
                entry_hash="9f2c4e7a10b35d68",
            ),
        ),
        chain_problem="",
    )  # fmt: skip


def checkpoints() -> CheckpointsDocument:
    def one(step: int, branch: str, state: str, **changes: object) -> CheckpointDocument:
        fields: dict[str, object] = {
            "branch": branch, "step": step, "place": f"checkpoints/{branch}/step-{step:08d}", "state": state,
            "is_in_line": True, "is_resume_point": False, "num_bytes": 182_403_121_152,
            "written_unix_s": NOW_S - (STEP - step) * 6.34, "consumed_tokens": step * 4_194_304, "round": 2,
            "pin_reason": "", "problem": "", "verified_unix_s": None, "verify_result": "", **changes,
        }  # fmt: skip
        return CheckpointDocument.model_validate(fields)

    return CheckpointsDocument(
        place="/data/runs/gpt-13b-demo/checkpoints",
        resume_reason="A restart resumes from step 48,000 of main-2, the newest complete one.",
        branches=(
            BranchDocument(
                name="main", parent="", parent_step=None, created_unix_s=NOW_S - 90_000, reason="", is_current=False,
            ),
            BranchDocument(
                name="main-2", parent="main", parent_step=30_800, created_unix_s=NOW_S - 30_000,
                reason="restored after incident 000002", is_current=True,
            ),
        ),
        checkpoints=(
            one(
                48_200, "main-2", "unfinished", problem="no COMMIT: it is being written, or its writer was killed",
                num_bytes=None,
            ),
            one(
                48_000, "main-2", "committed", is_resume_point=True, verified_unix_s=NOW_S - 700, verify_result="whole",
            ),
            one(
                46_000, "main-2", "damaged", problem="shard-0031.bin: 4,096 bytes are not as they were written",
                verified_unix_s=NOW_S - 9000, verify_result="1 file is not as it was written",
            ),
            one(40_000, "main-2", "pinned", pin_reason="before the change of data"),
            one(31_000, "main", "committed", is_in_line=False, round=1), one(30_800, "main", "committed", round=1),
        ),
        num_elsewhere=0,
    )  # fmt: skip


_RUNBOOKS = {"host-lost": "host-evicted-or-cordoned.md", "straggler": "straggler.md", "failure": "worker-ended.md"}
NOT_NOTIFIED = "email: not notified that it began, after 3 tries: 535"


def _story(incident: IncidentDocument) -> StoryDocument:
    began_s = incident.began_unix_s
    reported = () if incident.kind == "host-lost" else (
        HappenedDocument(at_unix_s=began_s + 4, what="notified", text="slack: notified that it began"),
        HappenedDocument(at_unix_s=began_s + 9, what="not-notified", text=NOT_NOTIFIED),
    )  # fmt: skip
    host = incident.hosts[0]
    return StoryDocument(
        incident_id=incident.incident_id,
        happened=(
            HappenedDocument(at_unix_s=began_s, what="fault", text=f"{incident.kind_text}: {host} {MARKUP}"),
            HappenedDocument(
                at_unix_s=incident.detected_unix_s, what="noticed", text="the driver of host-000 noticed it",
            ),
            HappenedDocument(at_unix_s=began_s + 11, what="decision", text=f"decided: {incident.action}"),
        ),
        notifications=reported, why_not_notified="" if reported else "Not notified yet: slack and email.",
        actions=(OfferedActionDocument(kind="evict", target=host), OfferedActionDocument(kind="cordon", target=host)),
        runbooks=(_RUNBOOKS[incident.kind], "gpu-errors.md"),
    )  # fmt: skip


def _logs(incident: IncidentDocument) -> IncidentLogsDocument:
    at_s = incident.began_unix_s
    lines = (f"Traceback (most recent call last): {MARKUP}", "RuntimeError: CUDA error: uncorrectable ECC error")
    is_open = incident.state == "open"
    return IncidentLogsDocument(
        round=incident.round,
        until_unix_s=at_s + 10,
        culprit_text="" if is_open else f"rank {incident.ranks[0]} on {incident.hosts[0]}",
        culprit_lines=() if is_open else tuple(
            IncidentLineDocument(rank=incident.ranks[0], host=incident.hosts[0], at_unix_s=at_s - 1 + place, line=line,
                                 is_cause=place == 1)
            for place, line in enumerate(lines)
        ),
        other_lines=tuple(
            IncidentLineDocument(rank=rank, host="host-012", at_unix_s=at_s + 2, is_cause=False,
                                 line="NCCL error: remote process exited or there was a network error")
            for rank in range(96, 104)
        ),
        label="" if is_open else "gpu_hardware",
        action="" if is_open else "evict_host",
        cause_line="" if is_open else lines[1],
        cause_rank=None if is_open else incident.ranks[0],
        problem="",
        log_file="",
    )  # fmt: skip


def record_responses() -> Mapping[str, Document]:
    """Return path -> response."""
    found: dict[str, Document] = {
        "incidents": IncidentsDocument(
            incidents=incidents(),
            verdicts=verdicts(),
            damaged=(DamagedIncidentDocument(incident_id="000000", text=f"000000.json: not JSON {MARKUP}"),),
        ),
        "audit": audit(),
        "checkpoints": checkpoints(),
    }
    found.update({f"incidents/{incident.incident_id}": incident for incident in incidents()})
    for incident in incidents():
        found[f"incidents/{incident.incident_id}/story"] = _story(incident)
        found[f"incidents/{incident.incident_id}/logs"] = _logs(incident)
    found["runbooks"] = RunbooksDocument(
        runbooks=tuple(
            RunbookNameDocument(name=runbook.name, title=runbook.title) for runbook in installed_runbooks().values()
        )
    )
    names = Names(JOB, f"/runs/{JOB}", host=SLOW_HOST, rank=91, round=1, incident="000001")
    for page in installed_runbooks().values():
        found[f"runbooks/{page.name}"] = RunbookDocument(
            name=page.name, title=page.title, incident_id="000001", steps=page.steps(names)
        )
    found.update({f"verdicts/{verdict.verdict_id}": verdict for verdict in verdicts()})
    return found
