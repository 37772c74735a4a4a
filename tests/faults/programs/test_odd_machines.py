"""A launched job on machines that lack what most have: an account of the user, a network, names for addresses."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.health_answers import ask_status
from tests.helpers.job_under_launch import LaunchedJob, make_launched_job
from tests.helpers.other_user import OTHER_USER, where_all_may_look
from tests.helpers.require import require
from tests.helpers.source_tree import ROOT
from tests.helpers.step_faults import FaultDirectory

pytestmark = pytest.mark.slow

STEPS = 12
MACHINES = {
    "a user without an account": (
        "setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups",
        "env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME",
    ),
    "loopback only, and no name can be resolved": (
        "unshare", "--net", "--mount", "sh", "-c",
        'ip link set lo up && for file in hosts resolv.conf; do mount --bind /dev/null /etc/$file; done && exec "$@"',
        "sh",
    ),
}  # fmt: skip
"""What begins the command line of a launch there."""


@pytest.mark.parametrize("machine", MACHINES)
def test_a_launch_trains_to_its_end(machine: str, tmp_path: Path) -> None:
    enter = MACHINES[machine]
    require("root", os.geteuid() == 0, "only root can act as another user, and make a network")
    require("setpriv, unshare, ip", all(map(shutil.which, ("setpriv", "unshare", "ip"))), "no such programs")
    others_may_read = all(path.stat().st_mode & 0o005 == 0o005 for path in (ROOT, *ROOT.parents))
    require("a tree that all may read", others_may_read, f"{ROOT} is private")
    job = make_launched_job(where_all_may_look(tmp_path), STEPS, {"dashboard": {"port": 0}})
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, OTHER_USER, OTHER_USER)
    arguments = ("--nproc-per-node", "2")
    with LaunchedJob(job, (), FaultDirectory(tmp_path / "faults"), arguments, has_daemon=True) as launched:
        os.chown(tmp_path / "faults", OTHER_USER, OTHER_USER)
        launched.start("host-0", enter=enter)
        assert launched.finish("host-0") == 0, launched.log("host-0")[-3000:]
        assert "Traceback" not in launched.log("host-0")
    assert [record["step"] for record in job.records("step")] == list(range(1, STEPS + 1))
    _, answer = ask_status(str(job.files.root))
    assert answer["state"] == "finished", answer
