"""All views name the same culprit of a launched job's broken round: the rank with the fault."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from megatrain.run_files.run_directory import RunDirectory
from tests.helpers.closed_loop import running_daemon
from tests.helpers.job_under_launch import WORKERS
from tests.helpers.named_culprits import named_by_commands, named_by_page
from tests.helpers.recovery_checks import running_job
from tests.helpers.served_run import RecordedPage
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHANGES = {
    "diagnostics": {"is_streamed": True},
    "recovery": {"restarts_per_hour": 100, "hangs_per_hour": 100, "host_failures_per_hour": 100, "hang_factor": 4.0},
}
FAULTS = [(3, 14, "kill"), (1, 22, "exception"), (2, 30, "stop")]


def test_incident_verbs_and_every_view_blame_the_same_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_job(tmp_path, CHANGES, ranks_per_host=WORKERS, orders=FAULTS) as running:
        run, name = RunDirectory(running.job.files.root), running.job.config.job.name
        with running_daemon(tmp_path, run.root, name, running.etcd.urls):
            assert running.finish() == 0
            incidents = running.view.incidents()
            assert len(incidents) == len(FAULTS), incidents
            with closing(RecordedPage(run)) as page:
                for one in incidents:
                    wait_until(partial(_are_logs_stored, page, one.round), "the lines to be stored")
        with closing(RecordedPage(run)) as page:
            for incident, (rank, _, kind) in zip(incidents, FAULTS, strict=True):
                host = f"host-{rank // 2}"
                named = named_by_page(page, incident.round) | named_by_commands(run, incident.round, capsys)
                named["the driver"] = (list(incident.culprit_ranks), list(incident.culprit_hosts))
                assert {"hang", "diag hang", "logs", "logs classify", "ranks"} <= named.keys()
                assert kind == "stop" or "workers that ended" in named
                assert named == dict.fromkeys(named, ([rank], [host])), kind


def _are_logs_stored(page: RecordedPage, round_number: int) -> bool:
    return page.client.get(f"/api/v1/logs/causes?round={round_number}").status_code == 200
