"""What the log of a job says of its writer: each success and each failure, once, whoever of several writers it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.checkpoint import job
from megatrain.checkpoint.job import JobCheckpoints
from megatrain.contracts.arena import Arena, create_arena
from megatrain.contracts.arena_plans import WriterStatus
from megatrain.contracts.errors import CheckpointError


def say(arena: Arena, pid: int, *, persisted: int, failures: int) -> None:
    WriterStatus(
        pid=pid, branch="main", round=0, num_persisted=persisted, num_failures=failures,
        last_persisted_step=10 * persisted if persisted else None, last_error="disk full" if failures else "",
        last_write_s=2.0, last_write_bytes=10**9,
    ).write(arena.writer_status)  # fmt: skip


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return create_arena(tmp_path / "arena")


@pytest.fixture
def checkpoints(arena: Arena, tmp_path: Path) -> JobCheckpoints:
    """Return those of a rank that has entered the arena; nothing else of it is there."""
    made: Any = object.__new__(JobCheckpoints)
    made._attachment = SimpleNamespace(arena=arena)
    made._peers = SimpleNamespace(news=list)
    made._told, made._start_problem, made._log = (0, 0, 0), "", tmp_path / "log"
    found: JobCheckpoints = made
    return found


def test_each_thing_is_told_once(checkpoints: JobCheckpoints, arena: Arena) -> None:
    assert checkpoints.news() == []
    say(arena, 100, persisted=1, failures=0)
    assert checkpoints.news() == ["checkpoint of step 10 is in storage (this host: 1 GB in 2.0 s, 0.50 GB/s)"]
    assert checkpoints.news() == []
    say(arena, 100, persisted=1, failures=1)
    assert checkpoints.news() == ["a checkpoint FAILED and is tried again at the next interval: disk full"]


def test_a_writer_that_was_started_anew_counts_anew(checkpoints: JobCheckpoints, arena: Arena) -> None:
    say(arena, 100, persisted=3, failures=2)
    assert len(checkpoints.news()) == 2
    say(arena, 200, persisted=1, failures=1)
    assert len(checkpoints.news()) == 2


def test_a_writer_that_cannot_be_started_is_told_and_tried_again(
    checkpoints: JobCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CheckpointError("no more processes")

    monkeypatch.setattr(job, "call_writer", refuse)
    checkpoints._call_writer()
    assert checkpoints.news() == ["no more processes; it is tried again"]
    assert checkpoints.news() == []
