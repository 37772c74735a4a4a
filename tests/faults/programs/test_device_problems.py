"""A launched job on a host whose GPUs break: from NVIDIA's binding to `status`, the page and /metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_nvml import FakeNvml, fake_nvml
from tests.helpers.job_under_launch import make_launched_job
from tests.helpers.paced_launch import paced_launch
from tests.helpers.paced_train import PaceDirectory, StepPace
from tests.helpers.source_tree import ROOT
from tests.helpers.train_process import TrainJob
from tests.helpers.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow

ENDLESS = 1_000_000


@pytest.fixture
def job(tmp_path: Path) -> TrainJob:
    changes = {"dashboard": {"port": 0}, "diagnostics": {"telemetry_interval_s": 0.5}}
    return make_launched_job(tmp_path, ENDLESS, changes)


@pytest.fixture
def nvml(job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Launch the job with a library that reports the values of the test."""
    nvml = fake_nvml(tmp_path)
    for name, value in nvml.environment.items():
        monkeypatch.setenv(name, value)
    pace = PaceDirectory(tmp_path / "pace", StepPace(forward_s=0.03, backward_s=0.06))
    with paced_launch(job, pace, 1, tmp_path / "launch.log"):
        yield nvml


def status(run: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "megatrain", "status", str(run), "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    return json.loads(done.stdout) if done.stdout else {}


def reasons(reported: dict[str, Any]) -> dict[str, str]:
    return {one["code"]: one["text"] for one in reported.get("health", {}).get("reasons", ())}


def got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def test_an_xid_and_a_lost_gpu_are_red_while_the_job_trains(job: TrainJob, nvml: FakeNvml) -> None:
    run = job.files.root
    wait_until(lambda: status(run).get("state") == "training", "the first step")
    wait_until(lambda: bool(status(run).get("dashboard_url")), "the dashboard, which may start later")
    api = f"{status(run)['dashboard_url'].rstrip('/')}/api/v1"
    host = status(run)["hosts"][0]["host"]

    def devices() -> dict[str, Any]:
        return json.loads(got(f"{api}/hosts/{host}/devices"))

    def ranks() -> list[tuple[int, int | None, str]]:
        return [(gpu["gpu"], gpu["rank"], gpu["error"]) for gpu in devices()["gpus"]]

    # The first reading may precede the workers' reports of their GPUs.
    wait_until(lambda: ranks() == [(0, 0, ""), (1, None, "")], "a reading with its rank")
    assert "gpu-failing" not in reasons(status(run))

    nvml.say(xid_0=79)
    wait_until(lambda: "Xid 79" in reasons(status(run)).get("gpu-failing", ""), "the Xid in status")
    assert f"GPU 0 of {host} (rank 0) reported Xid 79" in reasons(status(run))["gpu-failing"]
    assert status(run)["health"]["level"] == "red"
    overview = json.loads(got(f"{api}/overview"))
    assert "gpu-failing" in [one["code"] for one in overview["reasons"]]
    wait_until(lambda: [device["xid"] for device in devices()["xids"]] == [79], "the Xid on the host's page")

    nvml.say({1: {"lost": 1}})
    wait_until(lambda: devices()["gpus"][1]["error"] == "GPU is lost", "the lost GPU on the host's page")
    log = job.files.root / "logs"
    ports = [int(port) for path in log.rglob("*.log")
             for port in re.findall(r"/metrics of this host at 127\.0\.0\.1:(\d+)", path.read_text())]  # fmt: skip
    text = got(f"http://127.0.0.1:{ports[-1]}/metrics")
    assert re.search(r'^megatrain_gpu_lost\{gpu="1".*\} 1\.0$', text, re.MULTILINE)
    assert re.search(r'^megatrain_gpu_xids_total\{gpu="0".*kind="hardware"\} 1\.0$', text, re.MULTILINE)
    assert status(run)["state"] == "training", "none of these stops a job"
