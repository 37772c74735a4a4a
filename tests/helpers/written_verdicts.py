"""Verdicts as a daemon would write them, into the etcd of a simulated job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatrain.contracts.records.host_verdict import (
    Cause,
    HostVerdict,
    OutcomeKind,
    VerdictConfidence,
    VerdictKind,
    VerdictOutcome,
)
from megatrain.contracts.records.job_requests import JobRequest, RequestKind
from megatrain.contracts.records.record import decode, encode
from tests.helpers.driver_story import drive
from tests.helpers.raw_python import raw_python
from tests.helpers.simulated_etcd import KEYS
from tests.helpers.simulated_job import SimulatedJob

STRAGGLER = HostVerdict(
    verdict_id="v-1", kind=VerdictKind.STRAGGLER, round=1, cause=Cause.COMPUTE, confidence=VerdictConfidence.HIGH,
    created_unix_s=0.0, by="daemon-1", hosts=("host-2",), ranks=(2,), evidence=("its forward takes 1.3 x its peers'",),
    first_step=10, last_step=20, step_s=0.13, gain_s_per_step=0.03,
)  # fmt: skip
NUMERICS = replace(
    STRAGGLER, kind=VerdictKind.NUMERICS, cause=Cause.UNKNOWN, hosts=(), evidence=("loss is no number at step 21",),
    rollback_to=21, skip_from=21, skip_to=23, gain_s_per_step=0.0,
)  # fmt: skip


def write_verdict(job: SimulatedJob, verdict: HostVerdict = STRAGGLER, **changes: Any) -> str:
    """Write a current verdict with a new id; return it."""
    verdict_id = changes.pop("verdict_id", f"v-{len(job.etcd.log)}")
    written = replace(verdict, verdict_id=verdict_id, **{"created_unix_s": job.now, **changes})
    job.etcd.put(KEYS.verdict(verdict_id), encode(written))
    return verdict_id


def outcome_of(job: SimulatedJob, verdict_id: str) -> VerdictOutcome | None:
    """Return the outcome of a verdict so far."""
    item = job.etcd.items.get(KEYS.outcome(verdict_id))
    return None if item is None else decode(VerdictOutcome, item.value, "outcome")


def ask_about(job: SimulatedJob, kind: RequestKind, verdict_id: str) -> str:
    """Request to approve or to dismiss a verdict; return the request's id."""
    request_id = f"q{len(job.etcd.log)}"
    request = JobRequest(request_id, kind, "me@here", verdict=verdict_id)
    job.etcd.put(KEYS.request(request_id), encode(request))
    return request_id


def declined(job: SimulatedJob, verdict: HostVerdict = STRAGGLER, **changes: Any) -> str:
    """Return why a verdict is declined at once."""
    verdict_id = write_verdict(job, verdict, **changes)
    drive(job)
    outcome = outcome_of(job, verdict_id)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.DECLINED
    assert outcome.incident == outcome.by == ""
    assert raw_python(outcome.reason) == []
    return outcome.reason
