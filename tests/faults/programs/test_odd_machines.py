"""A launched job on a machine that lacks what most have: an account of the user, a network, names for addresses."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.health_answers import ask_status
from tests.helpers.job_under_launch import LaunchedJob, make_launched_job
from tests.helpers.require import require
from tests.helpers.step_faults import FaultDirectory

pytestmark = pytest.mark.slow

STEPS = 12
UID = "65533"
"""No account has this number."""
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
"""What begins the command line of a launch there: loopback only, no name can be resolved, no account of the user."""


def test_a_launch_trains_to_its_end(tmp_path: Path) -> None:
    require("unshare, ip", None not in (shutil.which("unshare"), shutil.which("ip")), "no such programs")
    probe = subprocess.run([*MACHINE, "true"], capture_output=True, text=True, check=False)
    require("namespaces", probe.returncode == 0, f"this user may make none: {probe.stderr.strip()}")
    job = make_launched_job(tmp_path, STEPS, {"dashboard": {"port": 0}})
    arguments = ("--nproc-per-node", "1")
    with LaunchedJob(job, (), FaultDirectory(tmp_path / "faults"), arguments, has_daemon=True) as launched:
        launched.start("host-0", enter=MACHINE)
        assert launched.finish("host-0") == 0, launched.log("host-0")[-3000:]
        assert "Traceback" not in launched.log("host-0")
    assert [record["step"] for record in job.records("step")] == list(range(1, STEPS + 1))
    _, answer = ask_status(str(job.files.root))
    assert (answer["kind"], answer["exit_code"]) == ("ended", 0), answer
