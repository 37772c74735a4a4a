"""The losses of the launched job without a fault: those of a job with a fault must equal them, bit by bit."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from tests.helpers.recovery_checks import running_job


def undisturbed_losses_of(ranks_per_host: int, own: Path, shared: Path) -> dict[int, float]:
    """Return the loss of every step. The first process that needs it runs the job, in `own`.

    shared: a directory of all processes of this pytest run.
    """
    with (shared / f"undisturbed-{ranks_per_host}.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        if not text:
            text = json.dumps(_losses_of_a_run(own, ranks_per_host))
            file.write(text)
    return {int(step): loss for step, loss in json.loads(text).items()}


def _losses_of_a_run(root: Path, ranks_per_host: int) -> dict[int, float]:
    with running_job(root, pace_s=0.0, ranks_per_host=ranks_per_host) as running:
        assert running.finish() == 0
        assert running.view.incidents() == []
        losses = running.launched.losses()
        running.check_nothing_left()
    return losses
