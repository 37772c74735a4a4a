"""A disk that becomes full between the writes of two hosts: the host that has stored its part does not delay
training."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatrain.checkpoint_format.checkpoint_names import COMMIT_NAME, step_of
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.local_location import LocalLocation
from tests.helpers.recovery_checks import ENDLESS, INTERVAL, RunningJob, running_job
from tests.helpers.small_disk import SmallDisk, small_disk
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow

DISK_BYTES = 256 << 20


def newest_step(running: RunningJob) -> int:
    return max((record["step"] for record in running.launched.step_records()), default=0)


def half_stored(branch: Path, index: int) -> list[int]:
    """Return the uncommitted steps that all hosts except that of `index` have stored."""
    found = []
    for directory in branch.glob("step-*"):
        names = {path.name for path in directory.iterdir()}
        done = [name for name in names if name.endswith(".done")]
        if done and not any(name.endswith(f"-{index:05d}.done") for name in done) and COMMIT_NAME not in names:
            found.append(step_of(directory.name))
    return [step for step in found if step is not None]


def test_a_disk_fills_up_after_one_host_has_stored_its_part(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        place = {"checkpoint": {"directory": str(disk.path / "checkpoints")}}
        # Nothing times out while the test waits: only the host that notices the full disk can end the checkpoint.
        changes = {"train": {"steps": ENDLESS}, "runtime": {"checkpoint_timeout_s": 3600.0}}
        with running_job(tmp_path / "job", place, changes, enter=disk.enter(), pace_s=0.2) as running:
            running.launched.wait_for_step(INTERVAL + 2)
            for index in (0, 1):  # the other host, which commits
                check_full_disk(running, disk, index)


def check_full_disk(running: RunningJob, disk: SmallDisk, index: int) -> None:
    """Fill the disk while the writer of a host waits with its part of a checkpoint."""
    branch = disk.seen / "checkpoints/main"
    begun = newest_step(running)
    (round_,) = running.view.rounds()
    host = round_.hosts[index].host
    (writer,) = running.writers(host)

    def half_stored_since() -> list[int]:
        return [step for step in half_stored(branch, index) if step > begun]

    os.kill(writer, signal.SIGSTOP)
    try:
        wait_until(lambda: bool(half_stored_since()), f"the part of the other host than {host}")
        (failing,) = half_stored_since()
        disk.fill()
    finally:
        os.kill(writer, signal.SIGCONT)

    running.launched.wait_for_step(newest_step(running) + 4 * INTERVAL)
    assert len(running.view.rounds()) == 1, host
    disk.free_space()

    def later() -> list[int]:
        return [step for step in committed_steps(LocalLocation(branch)) if step > failing]

    wait_until(lambda: bool(later()), f"a later checkpoint than that of {host}")
    assert failing not in committed_steps(LocalLocation(branch)), host
