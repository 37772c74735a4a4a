"""Launched jobs on a machine without account, network and names, with unusual paths, and after the terminal has
closed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from megatrain.cli import main
from tests.helpers.health_answers import ask_status
from tests.helpers.job_under_launch import VOCAB_SIZE, LaunchedJob, make_launched_job
from tests.helpers.require import require
from tests.helpers.step_faults import FaultDirectory
from tests.helpers.tiny_data import write_corpus

pytestmark = pytest.mark.slow

STEPS = 12
UID = "65533"
"""A user id without an account."""
_WITHOUT_NAMES = """
ip link set lo up
for file in hosts resolv.conf; do mount --bind /dev/null /etc/$file; done
exec "$@"
"""
MACHINE = (
    "unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _WITHOUT_NAMES, "sh",
    "unshare", "--user", f"--map-user={UID}", f"--map-group={UID}",
    "env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME",
)  # fmt: skip
"""The start of the command line of a launch there: loopback only, no name resolution, no account of the user."""


def test_a_launch_trains_to_its_end(tmp_path: Path) -> None:
    require("unshare, ip", None not in (shutil.which("unshare"), shutil.which("ip")), "no such programs")
    probe = subprocess.run([*MACHINE, "true"], capture_output=True, text=True, check=False)
    require("namespaces", probe.returncode == 0, f"this user may create none: {probe.stderr.strip()}")
    job = make_launched_job(tmp_path, STEPS, {"dashboard": {"port": 0}})
    arguments = ("--nproc-per-node", "1")
    with LaunchedJob(job, (), FaultDirectory(tmp_path / "faults"), arguments, has_daemon=True) as launched:
        launched.start("host-0", enter=MACHINE)
        assert launched.finish("host-0") == 0, launched.log("host-0")[-3000:]
        assert "Traceback" not in launched.log("host-0")
    assert [record["step"] for record in job.records("step")] == list(range(1, STEPS + 1))
    _, answer = ask_status(str(job.files.root))
    assert (answer["kind"], answer["exit_code"]) == ("ended", 0), answer


def test_launch_below_odd_names_outlives_its_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real, odd = tmp_path / "run '\xfc' \"x", tmp_path / "a link's \xfc"
    real.mkdir()
    odd.symlink_to(real, target_is_directory=True)
    # Neither data set has a meta.json, so their tokenizers cannot be compared: the log of the launch must name both.
    validation = write_corpus(odd / "held out" / "validation", 4_000, VOCAB_SIZE, seed=1)
    job = make_launched_job(
        odd, STEPS, {"job": {"name": "odd"}, "dashboard": {"port": 0}, "data": {"validation": str(validation)}}
    )
    run = str(job.files.root)
    arguments = ("--nproc-per-node", "1")
    faults = FaultDirectory(tmp_path / "faults", pace_s=0.3)
    with LaunchedJob(job, (), faults, arguments, has_daemon=True) as launched:
        launched.start("host-0", enter=("nohup",))
        launched.wait_for_step(2)
        for pid in launched.processes():
            os.kill(pid, signal.SIGHUP)
        assert main(["job", "checkpoint", run]) == 0
        assert ask_status(run)[1]["kind"] == "running"
        assert launched.finish("host-0") == 0, launched.log("host-0")[-3000:]
        log = launched.log("host-0")
    assert "Traceback" not in log
    (note,) = [line for line in log.splitlines() if "tokenizers that cannot be compared" in line]
    assert f"data.train={job.config.data.train!r}, data.validation={str(validation)!r}" in note
    capsys.readouterr()
    assert ask_status(run)[1]["exit_code"] == 0
    for words in (["incidents"], ["diag", "stragglers"], ["diag", "verdicts"], ["ckpt", "ls"], ["logs"]):
        code, output = main([*words, run]), capsys.readouterr()
        assert code == 0, (words, output.err)
        assert "Traceback" not in output.err
