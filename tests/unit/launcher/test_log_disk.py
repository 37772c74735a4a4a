"""Logs on a file system that hangs: ranks continue, and lost lines are bounded, counted and reported."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from megatrain_job.failures.verdict import Label
from megatrain_launcher.logs.disk import LogDisk
from megatrain_launcher.logs.files import RotatingFile
from megatrain_launcher.logs.worker_logs import WorkerLogs, rank_log_path
from tests.helpers.waiting import DEADLINE_S, wait_until

LINE = b"nothing to see, nothing to see\n"


@dataclass
class HangingFile(RotatingFile):
    """A file on a file system that accepts nothing until `answers` is set."""

    answers: threading.Event = field(default_factory=threading.Event)

    def write(self, chunk: bytes) -> None:
        self.answers.wait(DEADLINE_S)
        super().write(chunk)


def test_ranks_continue_while_the_log_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    max_waiting_bytes = 1 << 20
    monkeypatch.setattr("megatrain_launcher.logs.disk.MAX_WAITING_BYTES", max_waiting_bytes)
    answers = threading.Event()
    with WorkerLogs(tmp_path, tee="none", file_at=partial(HangingFile, answers=answers)) as logs:
        fd = logs.open_rank(1, 0)
        left = LINE * (2 * max_waiting_bytes // len(LINE)) + b"torch.OutOfMemoryError: CUDA out of memory."
        num_bytes = len(left)
        while left:
            left = left[os.write(fd, left) :]
        os.close(fd)
        verdict = logs.log_verdict_at_end(0, DEADLINE_S)
        assert verdict is not None
        assert verdict.label is Label.CUDA_OOM
        answers.set()
        logs.close_round(DEADLINE_S)

    text = rank_log_path(tmp_path, 1, 0).read_bytes()
    note = re.search(rb"\[megatrain: (\d+) bytes could not be written here\]\n$", text)
    assert note is not None
    assert len(text) - len(note[0]) + int(note[1]) == num_bytes
    assert text.startswith(LINE * 1000)


def test_a_hang_is_reported_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_launcher.logs.disk.STUCK_S", 0.0)
    disk, done = LogDisk(), threading.Event()
    file = HangingFile(tmp_path / "rank.log")
    disk.write(file, LINE)
    wait_until(lambda: "has not answered for 0 s" in disk.problem, "the problem")
    disk.set_when_written(done)
    file.answers.set()
    assert done.wait(DEADLINE_S)
    disk.close_file(file)
    disk.close(DEADLINE_S)
    assert disk.problem == ""
    assert file.path.read_bytes() == LINE


def test_closing_does_not_wait_for_a_hanging_disk(tmp_path: Path) -> None:
    disk, file = LogDisk(), HangingFile(tmp_path / "rank.log")
    disk.write(file, LINE)
    disk.close(0.01)
    assert not file.path.exists()
    file.answers.set()
