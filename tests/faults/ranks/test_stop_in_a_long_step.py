"""SIGTERM to a launched job whose steps take longer than runtime.save_grace_s: that step is saved, and nothing is
lost."""

from __future__ import annotations

import signal
from pathlib import Path

from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.local_location import LocalLocation
from tests.helpers.job_under_launch import make_launched_job
from tests.helpers.paced_launch import paced_launch
from tests.helpers.paced_train import PaceDirectory, StepPace
from tests.helpers.waiting import DEADLINE_S, wait_until

RANKS = 2
MICRO_BATCHES = 4
STEP_S = 3.2
GRACE_S = 1.0


def test_a_stop_during_a_long_step_loses_nothing(tmp_path: Path) -> None:
    job = make_launched_job(
        tmp_path,
        1000,
        {
            "checkpoint": {"interval": 1000, "keep_arena_s": 0.0},
            "runtime": {"save_grace_s": GRACE_S},
            "recovery": {"status_interval_s": 0.5},
            "diagnostics": {"is_streamed": False},
            "dashboard": {"is_served": False},
        },
    )
    pace = PaceDirectory(
        tmp_path / "pace", StepPace(forward_s=STEP_S / MICRO_BATCHES / 3, backward_s=2 * STEP_S / MICRO_BATCHES / 3)
    )
    with paced_launch(job, pace, RANKS, tmp_path / "launch.log") as launch:
        wait_until(lambda: len(job.records("step")) >= 3, "three steps")
        launch.send_signal(signal.SIGTERM)  # The next step has just begun, and takes three times the grace.
        code = launch.wait(DEADLINE_S)

    said = (tmp_path / "launch.log").read_text()
    assert code == 75, said[-3000:]
    done = [record["step"] for record in job.records("step")]
    assert done == [1, 2, 3, 4], "the step of the request is the last"
    assert committed_steps(LocalLocation(job.files.checkpoints / "main")) == [4]
    assert "runtime.save_grace_s=1 leaves too little room for that" in said
