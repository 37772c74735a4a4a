"""A launched job whose checkpoints fail: `status`, the page and /metrics agree; and a launch that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.diag_records import DaemonRecord
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode
from megatrain.coordination.client import EtcdClient
from megatrain.jobs.own_etcd import read_own_etcd
from megatrain_launcher.commands.status import StatusCode
from tests.helpers.job_under_launch import make_launched_job
from tests.helpers.paced_train import Pace, PaceDirectory
from tests.helpers.processes import descendants
from tests.helpers.source_tree import ROOT
from tests.helpers.train_process import Job
from tests.helpers.waiting import wait_until

SOON_S = 120.0
AGREE_S = 2.0
ANSWER_S = 2.0
ENDLESS = 1_000_000
Told = tuple[str, tuple[str, ...]]
"""A level, and the codes of the reasons."""
LATE_ADDITIONS = frozenset({"disk-filling", "step-late"})
"""What a crowded machine, or a small disk, may add to any answer."""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    changes = {
        "checkpoint": {"interval": 20}, "dashboard": {"port": 0}, "recovery": {"status_interval_s": 0.5},
        "diagnostics": {"daemon_metrics_port": 0},
    }  # fmt: skip
    return make_launched_job(tmp_path, ENDLESS, changes)


@pytest.fixture
def launched(job: Job, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    pace = PaceDirectory(tmp_path / "pace", Pace(forward_s=0.005, backward_s=0.01))
    words = ["-m", "megatrain", "launch", "--standalone", "--nproc-per-node=1", "-m", "tests.helpers.paced_train"]
    with (tmp_path / "launch.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words, str(job.config_file)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **pace.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    family = [process.pid]
    try:
        yield process
    finally:
        family += descendants(process.pid)
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


class Askers:
    """Whoever tells of the health of a job."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def status(self) -> Told:
        code, told = ask_status(self._run)
        assert code in (StatusCode.GREEN, StatusCode.AMBER, StatusCode.RED), told
        return _told(told["health"]["level"], [one["code"] for one in told["health"]["reasons"]])

    def page(self) -> Told:
        url = ask_status(self._run)[1]["dashboard_url"]
        overview = json.loads(_got(f"{url.rstrip('/')}/api/v1/overview"))
        return _told(overview["level"], [one["code"] for one in overview["reasons"]])

    def metrics(self) -> Told:
        own = read_own_etcd(self._run)
        with EtcdClient(own.settings) as client:
            item = client.get(JobKeys(own.job).daemon)
        assert item is not None
        text = _got(f"http://127.0.0.1:{decode(DaemonRecord, item.value, 'daemon').metrics_port}/metrics")
        (level,) = re.findall(r'^megatrain_job_health\{.*level="(\w+)"\} 1', text, re.MULTILINE)
        return _told(level, re.findall(r'^megatrain_job_health_reasons\{.*code="([\w-]+)"', text, re.MULTILINE))

    def wait_for(self, wanted: Callable[[Told], bool], what: str) -> Told:
        """Wait until `status` says what is wanted; then the others must say the same, each within two seconds."""
        found: list[Told] = []

        def is_told() -> bool:
            found[:] = [self.status()]
            return wanted(found[0])

        wait_until(is_told, what, SOON_S)
        deadline = time.monotonic() + AGREE_S
        for ask in (self.page, self.metrics):
            while (told := ask()) != found[0] and time.monotonic() < deadline:
                pass
            assert told == found[0], ask.__name__
        return found[0]


def ask_status(run: Path) -> tuple[int, dict[str, Any]]:
    words = [sys.executable, "-m", "megatrain", "status", str(run), "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def _told(level: str, codes: list[str]) -> Told:
    return level, tuple(sorted(set(codes) - LATE_ADDITIONS))


def _got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.timeout(600)
def test_checkpoints_that_fail_are_red_for_everyone_who_asks(job: Job, launched: subprocess.Popen[bytes]) -> None:
    run, main = job.files.root, job.files.checkpoints / "main"
    askers = Askers(run)
    wait_until(lambda: any(main.glob("step-*/COMMIT")), "a checkpoint", SOON_S)
    wait_until(lambda: ask_status(run)[1].get("dashboard_url"), "the page", SOON_S)
    assert askers.wait_for(lambda told: told[0] == "green", "green") == ("green", ())

    # the branch's directory can take nothing any more: a file has its name
    away = main.with_name("away")
    main.rename(away)
    main.write_text("no directory")
    askers.wait_for(lambda told: told[0] == "red" and "saves-fail" in told[1], "saves that fail")
    assert launched.poll() is None, "training goes on"

    main.unlink()
    away.rename(main)
    askers.wait_for(lambda told: told[0] == "green", "green again")


@pytest.mark.timeout(300)
def test_a_launch_that_is_killed_is_told_from_its_directory(job: Job, launched: subprocess.Popen[bytes]) -> None:
    run = job.files.root
    assert ask_status(run / "coordination" / "never")[0] == StatusCode.NEVER_STARTED
    wait_until(lambda: any((job.files.checkpoints / "main").glob("step-*/COMMIT")), "a checkpoint", SOON_S)
    family = descendants(launched.pid)

    # an etcd that hangs must not hold up the answer
    (etcd,) = [pid for pid in family if Path(f"/proc/{pid}/comm").read_text().strip() == "etcd"]
    os.kill(etcd, signal.SIGSTOP)
    began_s = time.monotonic()
    code, told = ask_status(run)
    assert (code, told["kind"]) == (StatusCode.UNREACHABLE, "unreachable"), told
    assert told["checkpoint_step"] >= 20
    assert time.monotonic() - began_s < ANSWER_S + _start_s(), "within two seconds"

    for pid in (launched.pid, *family):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launched.wait()
    code, told = ask_status(run)
    assert (code, told["kind"], told["exit_code"]) == (StatusCode.KILLED, "killed", None)
    assert f"process {launched.pid} on" in told["headline"]


def _start_s() -> float:
    """Return how long the program itself takes to start here: that is none of the answer."""
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "megatrain", "status", "--help"], cwd=ROOT, capture_output=True, timeout=60)
    return time.monotonic() - began_s
