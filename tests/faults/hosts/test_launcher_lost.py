"""A launch whose processes are all killed becomes an incident of the next launch: with its downtime, lost steps and
cause."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.records.record import decode
from megatrain.run_files.run_directory import RunDirectory
from tests.helpers.forked_launch import forked_launch
from tests.helpers.forked_program import ForkedProgram
from tests.helpers.job_under_launch import make_launched_job
from tests.helpers.processes import descendants, is_running
from tests.helpers.recovery_checks import HOSTS, running_job
from tests.helpers.step_faults import FaultDirectory
from tests.helpers.train_process import TrainJob
from tests.helpers.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow

CHANGES: dict[str, dict[str, Any]] = {"log": {"interval": 1}, "diagnostics": {"is_streamed": False}}
SIGN_S = 5.0
"""A rank of a job with steps of 0.1 s gives signs of life much more often."""


@contextmanager
def launch(job: TrainJob, faults: FaultDirectory, *overrides: str) -> Iterator[ForkedProgram]:
    """Launch the job on this machine; at the end all of its processes are gone."""
    words = ["--standalone", "--no-daemon", "--nproc-per-node=1", "-m", "tests.helpers.step_faults"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **faults.environment}
    with (
        (job.root / "launch.log").open("ab") as log,
        forked_launch([*words, str(job.config_file), *overrides], environment, log) as process,
    ):
        try:
            yield process
        finally:
            kill_all(process)


def done(job: TrainJob) -> int:
    return max((record["step"] for record in job.records("step")), default=0)


def kill_all(process: ForkedProgram) -> float:
    """Kill a launcher, and wait until all of its processes are gone; return the time of the kill, in unix seconds."""
    below = descendants(process.pid)
    struck = time.time()
    process.kill()
    process.wait()
    wait_until(
        lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and is_running(pid) for pid in below),
        "the end",
        deadline_s=2 * DEADLINE_S,
    )
    return struck


def check(incident: Incident, struck: float, relaunched: float, step: int) -> None:
    moments = incident.moments
    assert (incident.kind, incident.state) == (IncidentKind.LAUNCH_LOST, IncidentState.RECOVERED)
    assert struck - SIGN_S < moments.began <= struck + 1.0
    assert relaunched - 1.0 < moments.detected
    assert moments.first_step is not None
    assert moments.detected < moments.first_step
    assert incident.label == "launcher-lost"
    assert incident.last_step is not None
    assert incident.last_step >= step - 1
    assert incident.steps_lost is not None
    assert incident.evidence[0].startswith("the last sign of life, ")


@pytest.mark.timeout(900)
def test_launcher_lost_with_its_etcd_is_an_incident_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_launched_job(tmp_path, 40, CHANGES)
    faults = FaultDirectory(tmp_path / "faults", 0.1)
    with launch(job, faults) as first:
        wait_until(lambda: done(job) >= 25 or first.poll() is not None, "step 25", deadline_s=2 * DEADLINE_S)
        step = done(job)
        struck = kill_all(first)
    relaunched = time.time()
    # The launch after one that ended in order has no incident.
    for overrides in ((), ("--train.steps=45",)):
        with launch(job, faults, *overrides) as other:
            assert other.wait(DEADLINE_S) == 0, (job.root / "launch.log").read_text()[-3000:]

    (path,) = RunDirectory(job.files.root).incidents.glob("*.json")
    check(decode(Incident, path.read_bytes(), str(path)), struck, relaunched, step)
    assert main(["incidents", str(job.files.root), "--json"]) == 0
    (reported,) = json.loads(capsys.readouterr().out)["incidents"]
    assert reported["kind"] == "launch-lost"


@pytest.mark.timeout(900)
def test_loss_of_all_hosts_is_an_incident_of_the_next_launch(tmp_path: Path) -> None:
    with running_job(tmp_path, {"log": {"interval": 1}}, pace_s=0.1) as running:
        running.launched.wait_for_step(25)
        step = max(record["step"] for record in running.launched.step_records())
        struck = time.time()
        for host in HOSTS:
            running.launched.executors[host].send_signal(signal.SIGKILL)
        for host in HOSTS:
            running.launched.executors[host].wait()
        wait_until(lambda: running.view.hosts() == {}, "the leases of the first launch to end")
        relaunched = time.time()
        for host in HOSTS:
            running.launched.start(host)
        assert running.finish() == 0
        incident = running.only_incident()
        check(incident, struck, relaunched, step)
        running.check_history()
        running.check_nothing_left()
