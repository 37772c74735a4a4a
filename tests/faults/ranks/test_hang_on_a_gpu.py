"""A kernel hangs on one rank's GPU while all hosts run ahead: the driver names the rank, at the shipped hang_factor."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config.recovery import RecoveryConfig
from megatrain.contracts.records.incident import IncidentKind, IncidentState
from tests.helpers.recovery_checks import running_job
from tests.helpers.simulated_train import VARIABLE
from tests.helpers.training_case import on_layout

STEP = 20


@pytest.mark.parametrize(
    ("rank", "kernel", "where"), [(2, "forward", "forward-compute"), (1, "optimizer", "optimizer")]
)
def test_the_rank_whose_gpu_stopped_is_named(tmp_path: Path, rank: int, kernel: str, where: str) -> None:
    with running_job(
        tmp_path, on_layout(2, 1, 2), module="tests.helpers.simulated_train",
        environment={VARIABLE: f"{rank} {STEP} {kernel}"},
    ) as running:  # fmt: skip
        code = running.finish()
        incident = running.only_incident()

    assert RecoveryConfig().hang_factor == 10.0, "the job has the shipped patience"
    assert code == 0
    assert (incident.kind, incident.state) == (IncidentKind.HANG, IncidentState.RECOVERED)
    assert (incident.culprit_ranks, incident.culprit_hosts) == ((rank,), (f"host-{rank // 2}",)), incident
    # "likely": a busy machine took the evidence before the other ranks were in the exchange in which they wait
    assert incident.confidence in ("certain", "likely")
    assert any(f"rank {rank} is at step {STEP} in {where} on its GPU" in sentence for sentence in incident.evidence)
