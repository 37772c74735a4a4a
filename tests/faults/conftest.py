"""Fixtures of the tests that break launched jobs."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from tests.helpers.recovery_checks import running_job


@pytest.fixture(scope="session")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[int, float]:
    """The loss of every step of the launched job that nothing happens to. The first process that needs it runs it."""
    own = tmp_path_factory.mktemp("undisturbed")
    # under xdist each process has a directory of its own below the one of the run
    shared = own if worker_id == "master" else tmp_path_factory.getbasetemp().parent
    with (shared / "undisturbed.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        if not text:
            text = json.dumps(_losses_of_a_run(own))
            file.write(text)
    return {int(step): loss for step, loss in json.loads(text).items()}


def _losses_of_a_run(root: Path) -> dict[int, float]:
    with running_job(root, pace_s=0.0) as running:
        assert running.finish() == 0
        assert running.view.incidents() == []
        losses = running.launched.losses()
        running.check_nothing_left()
    return losses
