"""Verdicts that the test writes to etcd as the daemon writes them: a real job acts on them and trains on."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.lineage import candidates
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.contracts.records.host_verdict import (
    Cause,
    HostVerdict,
    OutcomeKind,
    VerdictConfidence,
    VerdictKind,
    VerdictOutcome,
)
from megatrain.contracts.records.incident import IncidentKind, IncidentState
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import Cordon
from megatrain.run_files.incidents import AUDIT_NAME, read_audit
from tests.helpers.recovery_checks import STEPS, RunningJob, running_job
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until

SPARE = "host-2"
CHEAP = {"diagnostics": {"restart_cost_s": 0.1}}


def publish_verdict(running: RunningJob, **changes: Any) -> HostVerdict:
    """Write a verdict on the current round."""
    verdict = HostVerdict(
        "20271121-101112-000", VerdictKind.STRAGGLER, running.view.rounds()[-1].number, Cause.COMPUTE,
        VerdictConfidence.HIGH, time.time(), "by-hand", step_s=0.05, gain_s_per_step=0.04,
        evidence=("written by hand",),
    )  # fmt: skip
    verdict = replace(verdict, **changes)
    running.view.client.put(running.view.keys.verdict(verdict.verdict_id), encode(verdict))
    return verdict


def wait_for_outcome(running: RunningJob, verdict: HostVerdict, kind: OutcomeKind) -> VerdictOutcome:
    def found() -> list[VerdictOutcome]:
        all_ = running.view.all("outcomes", VerdictOutcome)
        return [one for one in all_ if one.verdict_id == verdict.verdict_id and one.kind is kind]

    wait_until(lambda: bool(found()), f"verdict {verdict.verdict_id} to be {kind}")
    return found()[0]


def test_slow_host_is_replaced_by_the_spare_without_loss(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    with running_job(tmp_path, CHEAP, spare=SPARE, pace_s=0.15) as running:
        running.launched.wait_for_step(13)
        host = running.other_than_driver()
        verdict = publish_verdict(running, hosts=(host,))
        outcome = wait_for_outcome(running, verdict, OutcomeKind.ACTED)
        incident = running.view.wait_recovered(0)
        assert outcome.incident == incident.incident_id
        assert (incident.kind, incident.action, incident.culprit_hosts) == (IncidentKind.STRAGGLER, "evict", (host,))
        assert (incident.state, incident.verdict) == (IncidentState.RECOVERED, verdict.verdict_id)
        # It saved before it stopped, so no step is repeated.
        assert incident.resumed_step is not None
        assert incident.resumed_step >= 13
        assert incident.steps_lost == 0
        assert host not in [part.host for part in running.view.rounds()[-1].hosts]
        assert SPARE in [part.host for part in running.view.rounds()[-1].hosts]
        assert [cordon.host for cordon in running.view.all("cordons", Cordon)] == [host]
        assert running.finish(list(running.launched.executors)) == 0
        assert running.launched.losses() == undisturbed_losses
        steps = [record["step"] for record in running.launched.step_records()]
        assert steps == list(range(1, STEPS + 1))
        (entry,), damaged = read_audit(running.job.files.root / "incidents" / AUDIT_NAME)
        assert (entry.verdict, entry.outcome, damaged) == (verdict, outcome, 0)
        running.check_nothing_left()


@pytest.mark.slow
def test_an_approved_rollback_leaves_out_the_batches(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    """The job resumes neither from the snapshot of step 15 in memory nor from its checkpoint."""
    approval = {"diagnostics": {"restart_cost_s": 0.1, "eviction": "approval"}}
    with running_job(tmp_path, approval, pace_s=0.5) as running:
        running.launched.wait_for_step(17)
        verdict = publish_verdict(
            running, kind=VerdictKind.NUMERICS, cause=Cause.UNKNOWN, rollback_to=14, skip_from=15, skip_to=16,
            gain_s_per_step=0.0,
        )  # fmt: skip
        wait_for_outcome(running, verdict, OutcomeKind.WAITING)
        place = ["--rdzv-endpoint", ",".join(running.launched.endpoints), "--job", running.job.config.job.name]
        command = [sys.executable, "-m", "megatrain", "job", "approve", "--verdict", verdict.verdict_id, *place]
        asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert asked.returncode == 0, asked.stderr
        assert "round 2 trains" in asked.stdout
        incident = running.view.wait_recovered(0)
        assert (incident.kind, incident.action, incident.resumed_step) == (IncidentKind.NUMERICS, "rollback", 10)
        outcome = wait_for_outcome(running, verdict, OutcomeKind.ACTED)
        assert "@" in outcome.by
        assert running.finish() == 0
        losses = running.launched.losses()
        # The batches of steps 15 and 16, counted from 0, are skipped: that of step 17 takes the place of the first.
        assert {step: losses[step] for step in range(1, 16)} == {
            step: undisturbed_losses[step] for step in range(1, 16)
        }
        assert all(losses[step] != undisturbed_losses[step] for step in range(16, STEPS + 1))
        newest = candidates(LocalLocation(running.job.files.root / "checkpoints"))[0]
        assert (newest.branch, newest.step) == ("branch-0002", STEPS)
        batch = running.job.config.batch.global_batch_size
        manifest = read_manifest(newest.location)
        assert manifest.data.skipped == ((15 * batch, 17 * batch),)
        assert manifest.consumed_samples == (STEPS + 2) * batch
        entries, _ = read_audit(running.job.files.root / "incidents" / AUDIT_NAME)
        assert [entry.outcome.kind for entry in entries] == [OutcomeKind.WAITING, OutcomeKind.ACTED]
        running.check_nothing_left()
