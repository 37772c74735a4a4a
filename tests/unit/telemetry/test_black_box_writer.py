"""The black box file: created completely or not at all, readable while it is written and after kill -9."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrain.contracts.black_box.encoding import CONTROL_OFFSET, box_bytes
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import BlackBoxReader, read_black_box, write_control
from megatrain.contracts.black_box.values import ControlPage, Record, State
from megatrain.contracts.errors import DataError
from megatrain.run_files.run_directory import black_box_path, own_box_directory, own_box_paths, previous_black_box
from megatrain.telemetry.black_box_writer import open_writer
from megatrain.telemetry.recorder import open_recorder
from megatrain_diagnostics.streamer.ring_tail import RingTail
from tests.helpers.waiting import DEADLINE_S, wait_until
from tests.unit.telemetry.conftest import IDENTITY, Boxed

ROOT = Path(__file__).parents[3]

# Every field of a record has the same number, so a mixture of two records is detected.
SPINNER = """
import signal
import sys
from megatrain.contracts.black_box.operations import Operation
from megatrain.telemetry.recorder import open_recorder
from tests.unit.telemetry.conftest import IDENTITY
recorder = open_recorder(IDENTITY, directory=sys.argv[1], run_key="key", num_records=int(sys.argv[2]))
group = recorder.add_group("tp", [2, 3])
number = 0
while number < int(sys.argv[3]):
    number += 1
    recorder.set_step(number)
    with recorder.span(Operation.STEP):
        for _ in range(20):
            same = number % 1000
            with recorder.span(Operation.FORWARD_COMPUTE, microbatch=same, chunk=same, num_bytes=same, group=group):
                pass
    recorder.complete_step()
signal.pause()
"""


@pytest.fixture
def spinner(tmp_path: Path):
    """Start processes that record a number of steps of about 22 records; they are killed after the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(num_records: int, num_steps: int = 10**9) -> tuple[subprocess.Popen[bytes], Path]:
        command = [sys.executable, "-c", SPINNER, str(tmp_path), str(num_records), str(num_steps)]
        process = subprocess.Popen(command, cwd=ROOT)
        processes.append(process)
        return process, black_box_path(tmp_path, "demo", "key", "main", 1, 2)

    yield start
    for process in processes:
        process.kill()
        process.wait(timeout=DEADLINE_S)


def has_completed(path: Path, step: int) -> bool:
    if not path.exists():
        return False
    with BlackBoxReader(path) as reader:
        return (reader.progress().completed_step or 0) >= step


def assert_whole(record: Record) -> None:
    if record.operation == "forward-compute":
        same = record.step % 1000
        assert (record.microbatch, record.chunk, record.num_bytes, record.group) == (same, same, same, 1)
    assert record.launch_ns == record.start_ns
    assert record.duration_ns is None or record.start_ns + record.duration_ns <= time.monotonic_ns()


@pytest.mark.slow(kept=["256"])
@pytest.mark.parametrize("num_records", [256, 4096])
def test_records_are_whole_beside_the_writer_and_after_kill_9(spinner, num_records: int) -> None:
    process, path = spinner(num_records)
    wait_until(lambda: has_completed(path, num_records // 10), "the ring to wrap around")
    for _ in range(10):
        box = read_black_box(path)
        assert box.state is State.RUNNING
        for record in box.records:
            assert_whole(record)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=DEADLINE_S)
    box = read_black_box(path)
    assert box == read_black_box(path), "the writer is gone"
    assert box.state is State.RUNNING
    assert box.ended_ns is None
    assert box.num_torn <= 1
    numbers = sorted([record.sequence for record in box.records] + [total.sequence for total in box.totals])
    assert numbers[-1] >= box.cursor - 1
    # The slot that was being written when it was killed may still be all zeros, like an unused one.
    assert num_records - 1 <= len(numbers) + box.num_torn <= num_records
    for record in box.records:
        assert_whole(record)
    assert box.progress.current_step is not None
    assert box.progress.completed_step is not None
    assert box.progress.current_step - box.progress.completed_step in (0, 1)
    # The step and the forward in it; no other span is ever open, and a step has fewer than 30 records.
    assert len(box.in_flight) <= 2
    assert all(record.sequence > box.cursor - 30 for record in box.in_flight)
    group = box.groups[1]
    assert group.entered - group.left in (0, 1)


@pytest.mark.slow
def test_concurrent_reader_gets_every_record_once(spinner) -> None:
    process, path = spinner(65536, num_steps=2500)
    wait_until(lambda: has_completed(path, 1), "the first step")
    seen: list[int] = []
    with BlackBoxReader(path) as reader:
        tail = RingTail(reader)
        while len(seen) < 5000:
            polled = tail.poll(reader.cursor())
            assert polled.num_lost == 0
            seen += polled.ended["sequence"].tolist()
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=DEADLINE_S)
        seen += tail.poll(reader.cursor()).ended["sequence"].tolist()
        box = reader.snapshot()
    still_open = [record.sequence for record in box.in_flight]
    assert len(seen) == len(set(seen))
    assert sorted(seen + still_open) == sorted(
        [record.sequence for record in box.records] + [total.sequence for total in box.totals]
    )


def test_the_control_page_is_never_seen_half_written(boxed: Callable[..., Boxed]) -> None:
    box = boxed()
    stop = threading.Event()

    def command(first: int) -> None:
        number = first
        while not stop.is_set():
            number += 2
            write_control(box.path, ControlPage(command_number=number, interval_ns=2 * number, round=3 * number))

    # One writer is the rule; two of them may disturb each other but not the reader.
    threads = [threading.Thread(target=command, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        numbers = set()
        while len(numbers) < 60:
            page = box.recorder.read_control()
            assert (page.interval_ns, page.round) == (2 * page.command_number, 3 * page.command_number)
            numbers.add(page.command_number)
            seen = read_black_box(box.path).control
            assert seen is None or seen.round == 3 * seen.command_number
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=DEADLINE_S)
    write_control(box.path, ControlPage(round=1))
    assert box.recorder.read_control().round == 1, "the next write repairs the page"


def test_page_after_an_older_seqlock_word_is_read(boxed: Callable[..., Boxed]) -> None:
    """A slow second writer may store its word after those of the first."""
    box = boxed()
    write_control(box.path, ControlPage(round=1))
    assert box.recorder.read_control().round == 1
    with box.path.open("r+b") as file:
        file.seek(CONTROL_OFFSET)
        word = int.from_bytes(file.read(8), "little")
        file.seek(CONTROL_OFFSET)
        file.write((word - 2).to_bytes(8, "little"))
    write_control(box.path, ControlPage(round=2))
    assert box.recorder.read_control().round == 2


def test_the_file_is_complete_and_allocated_from_the_start(
    boxed: Callable[..., Boxed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(5_000, 10)
    with monkeypatch.context() as clocks:
        clocks.setattr(time, "monotonic_ns", lambda: next(ticks))
        clocks.setattr(time, "time_ns", lambda: next(ticks) + 10**18)
        box = boxed(num_records=1000)
    status = box.path.stat()
    assert status.st_size == box_bytes(1000)
    assert status.st_blocks * 512 >= status.st_size, "no holes: a store into one could kill the process"
    assert status.st_mode & 0o777 == 0o600
    assert list(own_box_directory(tmp_path).iterdir()) == [box.path]
    found = box.read()
    assert found.identity == IDENTITY
    assert found.capacity == 1000
    assert found.clock.error_ns == 20
    assert found.clock.unix_of(found.clock.monotonic_ns) == found.clock.monotonic_ns + 10**18


def test_a_restarted_rank_replaces_its_old_black_box(boxed: Callable[..., Boxed]) -> None:
    first = boxed()
    with first.recorder.span(Operation.GC):
        pass
    second = boxed()
    assert first.path == second.path
    assert second.read().records == ()
    with first.recorder.span(Operation.GC):  # into the old file, which has no name any more
        pass
    assert second.read().records == ()


def assert_falls_back(directory: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    with caplog.at_level(logging.WARNING):
        recorder = open_recorder(IDENTITY, directory=str(directory), run_key="key", num_records=256)
    (warning,) = caplog.records
    assert reason in warning.getMessage()
    assert "no black box for rank 2" in warning.getMessage()
    recorder.set_step(1)
    with recorder.span(Operation.GC):
        pass
    assert recorder.complete_step().totals[Operation.GC].count == 1
    recorder.close()
    assert len(caplog.records) == 1


def test_path_that_is_no_directory_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert_falls_back(tmp_path / "file" / "boxes", caplog, "Not a directory")


def test_a_full_tmpfs_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=2000, f_frsize=4096))
    assert_falls_back(tmp_path, caplog, "8192000 bytes are free, 28672 are needed and 8388608 must stay free")
    assert own_box_paths(tmp_path) == []


def test_tmpfs_that_fills_up_leaves_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    assert_falls_back(tmp_path, caplog, "No space left on device")
    assert list(own_box_directory(tmp_path).iterdir()) == []


def test_a_name_too_long_for_the_header_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        writer = open_writer(replace(IDENTITY, job="j" * 200), str(tmp_path), "key", 256)
    assert writer.path is None
    assert "has 200 bytes, the field holds 128" in caplog.text


def test_no_directory_means_no_black_box_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert open_writer(IDENTITY, "", "key", 256).path is None
    assert caplog.records == []


def test_writing_control_of_a_removed_black_box_is_an_error(boxed: Callable[..., Boxed]) -> None:
    box = boxed()
    box.recorder.close()
    with pytest.raises(DataError, match="No such file"):
        write_control(box.path, ControlPage())


def test_leftover_black_box_is_set_aside_not_removed(tmp_path: Path) -> None:
    path = black_box_path(tmp_path, "demo", "key", "main", 1, 2)
    killed = open_writer(IDENTITY, str(tmp_path), "key", 256)
    restarted = open_writer(replace(IDENTITY, pid=77), str(tmp_path), "key", 256)
    assert read_black_box(previous_black_box(path)).identity == IDENTITY
    assert read_black_box(path).identity.pid == 77
    killed.close(keep=False, has_failed=False)
    assert read_black_box(path).identity.pid == 77
    restarted.close(keep=False, has_failed=False)
    assert own_box_paths(tmp_path) == [previous_black_box(path)]
