"""The producers of pictures of a host do not answer: its rank waits, no rank counts as hung, and training continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.picture_shards import shard_tables, write_shards
from tests.helpers.processes import descendants, words_of
from tests.helpers.recovery_checks import HOSTS, RunningJob, running_job
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.slow


def producers_of(running: RunningJob, host: str) -> list[int]:
    wanted = b"megatrain.data.pictures.producer"
    return [pid for pid in descendants(running.launched.executors[host].pid) if wanted in words_of(pid)]


@pytest.mark.parametrize("loader", ["thread", "host"])
def test_ranks_that_wait_for_pictures_do_not_hang(loader: str, tmp_path: Path) -> None:
    tables: Mapping[str, Mapping[str, Any]] = shard_tables(write_shards(tmp_path / "shards"))
    changes = {"data": {**tables["data"], "train": "", "loader": loader}, "recovery": {"hang_floor_s": 2.0}}
    with running_job(tmp_path, tables, changes) as running:
        running.launched.wait_for_step(2)
        frozen = producers_of(running, HOSTS[1])
        assert frozen
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        wait_until(
            lambda: any("waits for its data" in running.launched.log(host) for host in HOSTS),
            "the driver's decision to wait",
        )
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        assert running.finish() == 0
        assert running.view.incidents() == []
        assert len(running.view.rounds()) == 1
        running.check_nothing_left()
