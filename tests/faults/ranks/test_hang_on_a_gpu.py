"""A kernel hangs on one rank's GPU while all hosts run ahead: the driver names the rank, with the default
hang_factor."""

from __future__ import annotations

from pathlib import Path

from megatrain.config.recovery import RecoveryConfig
from megatrain.contracts.records.incident import IncidentKind, IncidentState
from tests.helpers.job_under_launch import WORKERS
from tests.helpers.recovery_checks import running_job
from tests.helpers.simulated_train import VARIABLE
from tests.helpers.training_case import on_layout

STEP = 20
HUNG = [(2, "forward", "forward-compute"), (1, "optimizer", "optimizer")]
"""For each round: the rank, its kernel, and the span in which the rank counts as hung."""


def test_the_rank_whose_gpu_stopped_is_named(tmp_path: Path) -> None:
    kernels = ",".join(f"{rank} {STEP} {kernel}" for rank, kernel, _ in HUNG)
    with running_job(
        tmp_path, on_layout(2, 1, 2), ranks_per_host=WORKERS, module="tests.helpers.simulated_train",
        environment={VARIABLE: kernels},
    ) as running:  # fmt: skip
        code = running.finish()
        incidents = running.view.incidents()

    assert RecoveryConfig().hang_factor == 10.0, "the job has the default time limits"
    assert code == 0
    assert len(incidents) == len(HUNG), incidents
    for incident, (rank, kernel, where) in zip(incidents, HUNG, strict=True):
        assert (incident.kind, incident.state) == (IncidentKind.HANG, IncidentState.RECOVERED), kernel
        assert (incident.culprit_ranks, incident.culprit_hosts) == ((rank,), (f"host-{rank // 2}",)), incident
        # "likely": a busy machine collected the evidence before the other ranks were in the exchange in which they
        # wait.
        assert incident.confidence in ("certain", "likely"), kernel
        assert any(f"rank {rank} is at step {STEP} in {where} on its GPU" in text for text in incident.evidence), kernel
