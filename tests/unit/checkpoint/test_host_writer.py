"""The lines in a job's log about its writer: each success and each failure once, whichever writer had it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.arena.directory import Arena, create_arena
from megatrain.arena.plans import WriterStatus
from megatrain.checkpoint import host_writer
from megatrain.checkpoint.host_writer import HostWriter
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
def writer(arena: Arena, tmp_path: Path) -> HostWriter:
    return HostWriter(arena, tmp_path / "log")


def test_each_thing_is_reported_once(writer: HostWriter, arena: Arena) -> None:
    assert writer.new_messages() == []
    say(arena, 100, persisted=1, failures=0)
    assert writer.new_messages() == ["checkpoint of step 10 is in storage (this host: 1 GB in 2.0 s, 500 MB/s)"]
    assert writer.new_messages() == []
    say(arena, 100, persisted=1, failures=1)
    assert writer.new_messages() == ["a checkpoint FAILED and is tried again at the next interval: disk full"]


def test_restarted_writer_counts_from_zero(writer: HostWriter, arena: Arena) -> None:
    say(arena, 100, persisted=3, failures=2)
    assert len(writer.new_messages()) == 2
    say(arena, 200, persisted=1, failures=1)
    assert len(writer.new_messages()) == 2


def test_earlier_results_are_not_reported(arena: Arena, tmp_path: Path) -> None:
    say(arena, 100, persisted=3, failures=2)
    writer = HostWriter(arena, tmp_path / "log")
    assert writer.new_messages() == []
    assert writer.last_error() == "disk full"


def test_writer_that_cannot_start_is_reported_and_retried(
    writer: HostWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise CheckpointError("no more processes")

    monkeypatch.setattr(host_writer, "wake_or_start_writer", refuse)
    writer.wake_or_start()
    assert writer.new_messages() == ["no more processes; the writer is started again later"]
    assert writer.new_messages() == []
    assert writer.last_error() == f"see {tmp_path / 'log'}"
