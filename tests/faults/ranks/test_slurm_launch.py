"""Runs the batch script of --write-template slurm: two hosts, their own etcd, a time limit, a requeue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megatrain.config.load import load_config
from megatrain_launcher.launch.templates import write_template
from tests.helpers.etcd_server import etcd_program
from tests.helpers.fake_slurm import install
from tests.helpers.launch_cases import small_flags
from tests.helpers.waiting import DEADLINE_S, wait_until

MEGATRAIN = """
import argparse, os, signal, sys, threading, time
from pathlib import Path
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.launch import host
from megatrain_launcher.launch.flags import add_launch_arguments, launch_flags
from megatrain_launcher.launch.plan import make_plan
from tests.helpers.waiting import wait_until

here, asked = Path(sys.argv[0]).parent, threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: asked.set())
signal.signal(signal.SIGTERM, lambda *_: asked.set())
host.resolve = lambda name: "127.0.0.1"
parser = argparse.ArgumentParser()
add_launch_arguments(parser)
assert sys.argv[1] == "launch"
args, args.overrides = parser.parse_known_args(sys.argv[2:])
plan = make_plan(launch_flags(args), os.environ)

def execute(settings):
    restarts, mode = os.environ["SLURM_RESTART_COUNT"], os.environ["MODE"]
    assert (settings.min_hosts, settings.max_hosts) == (2, 2)
    mine, met = f"/megatrain/small/hosts/{settings.host}", f"/met/{restarts}/"
    with EtcdClient(settings.etcd) as client:
        client.put(mine, settings.launch_id)
        client.put(met + settings.host, settings.launch_id)
        wait_until(lambda: len(client.read_all(KeyRange.prefix(met)).items) == 2, "both hosts")
        (here / f"{settings.host}.{restarts}").write_text(settings.launch_id)
        if mode == "killed" and settings.host == "node1" and restarts == "0":
            client.delete(mine)
            os.kill(os.getpid(), signal.SIGKILL)
        while restarts == "0" and mode != "failing" and not asked.wait(0.02):
            pass
        client.delete(mine)
    return {"0": 1 if mode == "failing" else 75}.get(restarts, 0)

sys.exit(host.run_launch(plan, os.environ, execute, print))
"""
"""The real launch around a stand-in for the executor, which connects to the other host and waits for the signal."""


@contextmanager
def submitted(directory: Path, mode: str) -> Iterator[subprocess.Popen[bytes]]:
    """Submit the job; at the end of the block it is over."""
    etcd_program()
    install(directory, MEGATRAIN)
    flags = small_flags(directory, template="slurm", min_hosts=2, max_hosts=2)
    script = directory / "job.sbatch"
    script.write_text(write_template(flags, load_config(flags.config).config, 2))
    environment = {
        **os.environ, "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}", "MODE": mode,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    with subprocess.Popen(["sbatch", script], env=environment, cwd=directory, start_new_session=True) as job:
        try:
            yield job
            job.wait(DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)  # All processes that it started, if it has not ended by itself.


def codes(directory: Path) -> list[int]:
    return [int(line) for line in (directory / "codes").read_text().split()]


@pytest.mark.slow(kept=["orderly"])
@pytest.mark.parametrize("mode", ["orderly", "killed"])
def test_the_time_limit_saves_and_the_job_goes_on_later(tmp_path: Path, mode: str) -> None:
    with submitted(tmp_path, mode) as job:
        wait_until(lambda: (tmp_path / "node0.0").exists() and (tmp_path / "node1.0").exists(), "both hosts")
        (tmp_path / "time-limit").touch()
    # A killed host makes srun end with 137; the job nevertheless ended with 75.
    assert codes(tmp_path) == [75, 0]
    assert job.returncode == 0
    assert (tmp_path / "node0.0").read_text() == (tmp_path / "node1.0").read_text() == "slurm-17.0.0"
    assert (tmp_path / "node1.1").read_text() == "slurm-17.1.0"
    password = tmp_path / "run" / "coordination" / "password"
    assert password.stat().st_mode & 0o777 == 0o600


def test_a_job_that_fails_is_not_put_into_the_queue_again(tmp_path: Path) -> None:
    with submitted(tmp_path, "failing") as job:
        pass
    assert codes(tmp_path) == [1]
    assert job.returncode == 1
