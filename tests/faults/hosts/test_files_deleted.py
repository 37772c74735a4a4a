"""Directories of a run are removed while it trains; and the files that a stopped job leaves."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import Answer, RequestKind
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.jobs.assessment import assess
from megatrain_job.jobs.health import HealthLevel, Reason
from megatrain_job.jobs.own_etcd import read_own_etcd
from megatrain_job.jobs.send_request import checked, make_request, request_events
from megatrain_job.jobs.snapshot import read_job
from tests.helpers.etcd_server import etcd_program
from tests.helpers.job_under_launch import LaunchedJob, make_launched_job
from tests.helpers.outage_job import OutageJob, outage_job
from tests.helpers.step_faults import FaultDirectory
from tests.helpers.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.timeout(600)

LONG_KEPT = {"checkpoint": {"keep_arena_s": 1800.0, "interval": 5}}


def newest_step(launched: LaunchedJob) -> int:
    return max((record["step"] for record in launched.step_records()), default=0)


def reasons(launched: LaunchedJob) -> tuple[Reason, ...]:
    reported = read_own_etcd(launched.job.files.root)
    with EtcdClient(reported.settings) as client:
        return assess(read_job(client, JobKeys(reported.job)), time.time()).health.reasons


def counter_and_rounds(launched: LaunchedJob) -> tuple[str, int]:
    """Return the id of the cluster that counts the rounds, and the number of rounds."""
    reported = read_own_etcd(launched.job.files.root)
    with EtcdClient(reported.settings) as client:
        rounds = read_job(client, JobKeys(reported.job)).rounds
        return client.gateway.cluster_id, max(rounds)


def is_filled(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def remove(directory: Path) -> None:
    """Remove a directory while other processes write to it; files that they add meanwhile are removed too."""
    aside = directory.with_name(f"{directory.name}.removed")
    directory.rename(aside)
    wait_until(lambda: shutil.rmtree(aside, ignore_errors=True) or not aside.exists(), f"{directory} to go")


def left_behind(launched: LaunchedJob) -> list[str]:
    """Return the files and processes of an ended launch that exist at this moment."""
    return [*map(str, launched.processes()), *(path.name for path in launched.job.root.glob("megatrain-arena*"))]


@pytest.mark.slow
def test_job_reports_removed_files_and_trains_on(tmp_path: Path) -> None:
    etcd_program()
    job = make_launched_job(tmp_path, 100_000, LONG_KEPT, {"log": {"interval": 5}, "dashboard": {"is_served": False}})
    words = ("--nnodes", "2", "--nproc-per-node", "1")
    with LaunchedJob(job, (), FaultDirectory(tmp_path / "faults", 0.3), words, has_daemon=True) as launched:
        launch = launched.start("launch")
        launched.wait_for_step(6)
        before = counter_and_rounds(launched)
        for name in ("logs", "metrics", "events", "incidents", "diagnosis", "checkpoints", "coordination"):
            place = job.files.root / name
            remove(place)

            def reported(name: str = name) -> Reason | None:
                try:
                    found = reasons(launched)
                except (OSError, CoordinationError):  # The password of etcd is among the removed files.
                    return None
                words = re.compile(rf"/run/{name}\S*( \([^)]*\))? was removed from outside")
                return next((one for one in found if words.search(one.text)), None)

            wait_until(lambda: reported() is not None, f"the report of {name}")
            reason = reported()
            assert reason is not None
            assert (reason.level is HealthLevel.RED) is (name == "coordination")
            wait_until(lambda place=place, name=name: is_filled(place) or name == "incidents", f"{name} to be filled")
            assert place.is_dir()
        reached = newest_step(launched)
        launched.wait_for_step(reached + 6)
        wait_until(lambda: list(job.files.checkpoints.glob("*/step-*/COMMIT")), "a checkpoint")
        assert counter_and_rounds(launched) == before  # No process was restarted, and no round began.
        log = next(path for path in job.files.logs.rglob("rank-00000.log"))
        wait_until(lambda: "step" in log.read_text(), "lines of rank 0")

        launch.send_signal(signal.SIGTERM)
        assert launched.finish("launch") == ExitCode.SAVED_AND_STOPPED
        assert left_behind(launched) == []

        saved = newest_step(launched)
        launch = launched.start("launch")
        launched.wait_for_step(saved + 2)
        assert next(record["step"] for record in launched.step_records() if record["step"] > saved) == saved + 1
        assert counter_and_rounds(launched) == (before[0], before[1] + 1)
        launch.send_signal(signal.SIGTERM)
        assert launched.finish("launch") == ExitCode.SAVED_AND_STOPPED
        assert left_behind(launched) == []


def evict(running: OutageJob) -> None:
    """Cordon and evict a training host; a spare takes its place, and the host waits as a spare."""
    request = make_request(RequestKind.EVICT, host="host-1", reason="a test")
    for news in request_events(running.view.client, running.view.keys, request, timeout_s=DEADLINE_S):
        if isinstance(news, Answer) and checked(news).is_done:
            break
    running.wait_for_round(2)


@pytest.mark.slow
def test_stopped_job_leaves_nothing_on_an_evicted_host(tmp_path: Path) -> None:
    """The writer of the evicted host gets no message about the end of the job."""
    with outage_job(tmp_path, LONG_KEPT, ranks_per_host=1, pace_s=0.3) as running:
        evict(running)
        codes = running.stop()
        assert set(codes.values()) == {int(ExitCode.SAVED_AND_STOPPED)}, codes
        assert left_behind(running.launched) == []
