"""Every kind of failure of a rank, at every place: it is named, noticed and handled in time, and the losses are the
same."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.incident import IncidentKind, IncidentState
from tests.helpers.job_under_launch import WORKERS
from tests.helpers.recovery_checks import STEPS, RunningJob, running_job
from tests.helpers.tiny_data import write_corpus

ENDS = {
    "exception": 1, "abort": -6, "abort-in-thread": -6, "segfault": -11, "kill": -9, "exit": 3,
}  # fmt: skip
"""Kind of fault -> the rank's exit code."""
HANGS = ("stop", "interpreter-lock", "sleep")
MANY_RESTARTS = {"recovery": {"restarts_per_hour": 100, "hangs_per_hour": 100, "host_failures_per_hour": 100}}


def check_undisturbed(running: RunningJob, undisturbed_losses: dict[int, float]) -> None:
    assert running.launched.losses() == undisturbed_losses
    assert len(undisturbed_losses) == STEPS
    running.check_nothing_left()


def test_every_end_of_a_rank(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    """Alternately of rank 0, which has more tasks than others, and of the last rank."""
    ends = [(kind, code, 3 * (number % 2)) for number, (kind, code) in enumerate(ENDS.items())]
    orders = [(rank, 6 + 6 * number, kind) for number, (kind, _, rank) in enumerate(ends)]
    with running_job(tmp_path, MANY_RESTARTS, ranks_per_host=WORKERS, orders=orders) as running:
        assert running.finish() == 0
        incidents = running.view.incidents()
        assert len(incidents) == len(ENDS), incidents
        for number, (incident, (kind, code, rank)) in enumerate(zip(incidents, ends, strict=True)):
            assert incident.kind is IncidentKind.FAILURE, kind
            assert incident.culprit_ranks == (rank,), kind
            assert incident.culprit_hosts == (f"host-{rank // 2}",), kind
            assert incident.action == "restart", kind
            assert code in [failure.exit_code for failure in incident.failures if failure.rank == rank], kind
            running.check_recovered(incident, running.struck_unix_s(number))
        assert "an injected fault in user code" in incidents[0].reason
        check_undisturbed(running, undisturbed_losses)


def test_every_hang_of_a_rank(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    hangs = [(kind, 3 * (number % 2)) for number, kind in enumerate(HANGS)]
    orders = [(rank, 14 + 8 * number, kind) for number, (kind, rank) in enumerate(hangs)]
    with running_job(tmp_path, MANY_RESTARTS, ranks_per_host=WORKERS, orders=orders) as running:
        assert running.finish() == 0
        incidents = running.view.incidents()
        assert len(incidents) == len(HANGS), incidents
        for number, (incident, (kind, rank)) in enumerate(zip(incidents, hangs, strict=True)):
            assert incident.kind is IncidentKind.HANG, kind
            assert incident.culprit_ranks == (rank,), kind
            assert incident.culprit_hosts == (f"host-{rank // 2}",), kind
            running.check_recovered(incident, running.struck_unix_s(number))
        check_undisturbed(running, undisturbed_losses)


@pytest.mark.slow
def test_all_workers_of_both_hosts_at_once(tmp_path: Path, undisturbed_losses: dict[int, float]) -> None:
    with running_job(tmp_path, ranks_per_host=WORKERS) as running:
        running.launched.wait_for_step(14)
        workers = [pid for rank in range(4) for pid in running.pids(f"mt-rank-{rank}")]
        assert len(workers) == 4
        struck = time.time()
        # The others are stopped first: a running worker would notice their deaths, and end by itself.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in workers:
                os.kill(pid, number)
        assert running.finish() == 0
        incident = running.only_incident()
        assert incident.action == "restart"
        assert {one.exit_code for one in incident.failures} == {-9}
        running.check_recovered(incident, struck)
        running.check_history()
        check_undisturbed(running, undisturbed_losses)


@pytest.mark.slow
def test_a_host_that_hangs_twice_within_an_hour_is_evicted(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    orders = [(2, 14, "stop"), (3, 22, "stop")]
    with running_job(tmp_path, ranks_per_host=WORKERS, orders=orders, spare="host-2") as running:
        assert running.finish(("host-0", "host-2")) == 0
        first, second = running.view.incidents()
        assert (first.action, first.culprit_ranks) == ("restart", (2,))
        assert (second.action, second.culprit_ranks, second.culprit_hosts) == ("evict", (3,), ("host-1",))
        assert [part.host for part in running.view.rounds()[-1].hosts] == ["host-0", "host-2"]
        check_undisturbed(running, undisturbed_losses)


@pytest.mark.slow
def test_rank_fails_before_steps_in_load_snapshot_and_evaluation(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    validation = write_corpus(tmp_path / "data" / "validation", 2_000, 61, seed=1)
    timeouts = {
        "runtime": {"first_step_timeout_s": 12.0, "checkpoint_timeout_s": 12.0, "evaluation_timeout_s": 12.0},
        "data": {"train": str(tmp_path / "data" / "train"), "validation": str(validation)},
        "evaluation": {"interval": 12, "num_samples": 16},
    }
    orders: list[tuple[Any, ...]] = [(2, 0, "kill"), (2, 0, "stop"), (3, 3, "stop", "load")]
    orders += [(1, 20, "stop", "snapshot"), (0, 36, "stop", "evaluation")]
    with running_job(tmp_path, MANY_RESTARTS, timeouts, ranks_per_host=WORKERS, orders=orders) as running:
        assert running.finish() == 0
        incidents = running.view.incidents()
        assert [incident.culprit_ranks for incident in incidents] == [(2,), (2,), (3,), (1,), (0,)], incidents
        assert [one.kind for one in incidents] == [IncidentKind.FAILURE, *[IncidentKind.HANG] * 4]
        for number, incident in enumerate(incidents):
            assert incident.moments.detected >= running.struck_unix_s(number), incident
        check_undisturbed(running, undisturbed_losses)


@pytest.mark.slow
def test_an_exit_code_that_no_restart_repairs(tmp_path: Path) -> None:
    with running_job(tmp_path, ranks_per_host=WORKERS, orders=[(2, 6, "exit-of-bad-data")]) as running:
        assert running.finish() == ExitCode.DATA
        incident = running.only_incident()
        assert (incident.state, incident.action) == (IncidentState.STOPPED, "stop")
        assert incident.culprit_ranks == (2,)
        assert "a restart does not help" in incident.reason
        assert len(running.view.rounds()) == 1
        running.check_nothing_left()


@pytest.mark.slow
def test_a_mistake_in_user_code_that_comes_again_stops_the_job(tmp_path: Path) -> None:
    with running_job(tmp_path, ranks_per_host=WORKERS, orders=[(2, 13, "exception")] * 2) as running:
        assert running.finish() == 1
        first, second = running.view.incidents()
        assert (first.action, first.label, second.action, second.label) == ("restart", "user_code", "stop", "user_code")
        assert "as before at the same step" in second.reason
        assert len(running.view.rounds()) == 2
        running.check_nothing_left()


@pytest.mark.slow
def test_restarts_without_progress_stop_the_job(tmp_path: Path) -> None:
    with running_job(tmp_path, ranks_per_host=WORKERS, orders=[(1, 13, "kill")] * 5) as running:
        assert running.finish() == 1
        *before, last = running.view.incidents()
        assert [incident.action for incident in before] == ["restart"] * 3
        assert last.action == "stop"
        assert "restarts in a row completed no new step" in last.reason
        assert all(incident.incident_id in last.reason for incident in before)
        end = running.view.end()
        assert end is not None
        assert end.reason == last.reason
        running.check_nothing_left()
