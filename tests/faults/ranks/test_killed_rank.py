"""A launched job with the default leases and silence limits: one rank is killed, the job continues, and no loss
differs."""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.records.incident import IncidentKind, IncidentState
from tests.helpers.job_under_launch import WORKERS
from tests.helpers.recovery_checks import STEPS, running_job


def test_a_job_recovers_from_a_killed_rank(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    # Streamers without a daemon disturb nothing.
    streamed = {"diagnostics": {"is_streamed": True}}
    with running_job(tmp_path, streamed, ranks_per_host=WORKERS, orders=[(3, 14, "kill")]) as running:
        assert running.finish() == 0
        incident = running.only_incident()
        assert incident.kind is IncidentKind.FAILURE
        assert incident.state is IncidentState.RECOVERED
        assert incident.culprit_ranks == (3,)
        assert incident.action == "restart"
        assert -9 in [failure.exit_code for failure in incident.failures if failure.rank == 3]
        assert len(undisturbed_losses) == STEPS
        assert running.launched.losses() == undisturbed_losses
        running.check_nothing_left()
