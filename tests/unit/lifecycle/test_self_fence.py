"""A worker that ends itself, with real black boxes; and with real workers whose executor, this test, says no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatrain.contracts.black_box import write_control
from megatrain.contracts.black_box_values import ControlPage, Identity, Phase
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain.contracts.run_directory import black_box_path
from megatrain.failures.patience import Patience
from megatrain.self_fence import SelfFence
from megatrain.telemetry.recorder import Recorder, open_recorder
from tests.helpers.processes import is_running
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import wait_until

DEADLINE_S = 20.0
ROUND = 3
LONG_NS = 600 * 10**9
NEVER = Patience(init_s=600, first_step_s=600, checkpoint_s=600, evaluation_s=600, floor_s=600, factor=10)
AT_ONCE = Patience(init_s=0, first_step_s=0, checkpoint_s=600, evaluation_s=600, floor_s=0, factor=0)
STANDS_STILL = "this host fenced itself: its lease was not renewed in time, and init has not moved for 0."

# Opens its black box, tells the watchdog, which looks oftener than elsewhere, starts a child in its own group, and
# stands still.
WORKER = """
import os, pathlib, subprocess, sys, time
from megatrain import lifecycle
from megatrain.failures.patience import Patience
patience = Patience(init_s=0, first_step_s=0, checkpoint_s=0, evaluation_s=0, floor_s=0, factor=0)
lifecycle._LOOK_S = 0.1
watchdog = lifecycle.start_watchdog(600, 5, patience)
watchdog.follow(pathlib.Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(watchdog.pid, child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[tuple[Recorder, Path]]:
    identity = Identity("demo", "main", ROUND, 5, Layout(dp_size=8), os.getpid(), "host-1")
    recorder = open_recorder(identity, directory=str(tmp_path), run_key="key", num_records=64)
    yield recorder, black_box_path(tmp_path, "demo", "key", "main", ROUND, 5)
    recorder.close()


def lease_until(path: Path, time_ns: int, round_number: int = ROUND) -> None:
    write_control(path, ControlPage(lease_ok_until_ns=time_ns, round=round_number))


def looks(fence: SelfFence, count: int = 3) -> list[str]:
    return [fence.look() for _ in range(count)]


def test_a_worker_without_an_executor_is_left_alone(box: tuple[Recorder, Path]) -> None:
    assert looks(SelfFence(box[1], AT_ONCE)) == ["", "", ""]


def test_a_worker_whose_host_holds_its_lease_is_left_alone(box: tuple[Recorder, Path]) -> None:
    lease_until(box[1], time.monotonic_ns() + LONG_NS)
    assert looks(SelfFence(box[1], AT_ONCE)) == ["", "", ""]


def test_a_worker_that_moves_is_left_alone_without_a_lease(box: tuple[Recorder, Path]) -> None:
    lease_until(box[1], 1)
    assert looks(SelfFence(box[1], NEVER)) == ["", "", ""]


def test_a_worker_that_stands_still_without_a_lease_ends_at_the_second_look(box: tuple[Recorder, Path]) -> None:
    lease_until(box[1], time.monotonic_ns())
    first, second, _ = looks(SelfFence(box[1], AT_ONCE))
    assert first == ""
    assert second.startswith(STANDS_STILL)


def test_a_worker_that_moved_between_two_looks_is_left_alone(box: tuple[Recorder, Path]) -> None:
    recorder, path = box
    lease_until(path, 1)
    fence = SelfFence(path, AT_ONCE)
    assert fence.look() == ""
    recorder.set_phase(Phase.CHECKPOINT)  # which has more patience
    assert looks(fence) == ["", "", ""]
    recorder.set_phase(Phase.INIT)
    assert fence.look() == ""
    assert fence.look().startswith(STANDS_STILL)


@pytest.mark.parametrize(("round_number", "is_over"), [(ROUND - 1, False), (ROUND, False), (ROUND + 1, True)])
def test_a_worker_of_an_older_round_ends_although_it_moves(
    box: tuple[Recorder, Path], round_number: int, is_over: bool
) -> None:
    lease_until(box[1], time.monotonic_ns() + LONG_NS, round_number)
    _, second, _ = looks(SelfFence(box[1], NEVER))
    wanted = "this host fenced itself: it has come to round 4, and this worker is of round 3"
    assert second == (wanted if is_over else "")


def test_a_black_box_that_is_no_more_is_an_error_that_names_it(box: tuple[Recorder, Path]) -> None:
    fence = SelfFence(box[1], AT_ONCE)
    os.truncate(box[1], 10)
    with pytest.raises(DataError, match=box[1].name):
        fence.look()
    with pytest.raises(DataError, match="no-box"):
        SelfFence(box[1].with_name("no-box"), AT_ONCE)


@pytest.fixture
def start() -> Iterator[Callable[[Path], tuple[subprocess.Popen[str], int, int]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(
        path: Path, *, has_own_group: bool = True, stderr: int = subprocess.PIPE
    ) -> tuple[subprocess.Popen[str], int, int]:
        """Return a worker, and the numbers of its watchdog and of its child."""
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)], stdout=subprocess.PIPE, stderr=stderr, text=True,
            cwd=ROOT, process_group=0 if has_own_group else None,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        watchdog, child = map(int, process.stdout.readline().split())
        return process, watchdog, child

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def test_the_watchdog_ends_worker_and_group_when_the_executor_says_no_more(
    box: tuple[Recorder, Path], start: Callable[..., tuple[subprocess.Popen[str], int, int]]
) -> None:
    lease_until(box[1], time.monotonic_ns())
    process, watchdog, child = start(box[1])
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    told = f"megatrain: rank 5 (process {process.pid}) is ended by its watchdog: {STANDS_STILL.removesuffix('0.')}"
    assert errors.startswith(told)
    assert errors.count("\n") == 1
    wait_until(lambda: not (is_running(child) or is_running(watchdog)), "the end of the group", DEADLINE_S)


def test_the_watchdog_ends_nobody_else_where_the_group_is_not_the_workers_own(
    box: tuple[Recorder, Path], start: Callable[..., tuple[subprocess.Popen[str], int, int]]
) -> None:
    lease_until(box[1], time.monotonic_ns())
    process, _, child = start(box[1], has_own_group=False)
    try:
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == -signal.SIGKILL
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_watchdog_that_cannot_look_says_so_once_and_stays(
    tmp_path: Path, start: Callable[..., tuple[subprocess.Popen[str], int, int]]
) -> None:
    process, watchdog, child = start(tmp_path / "no-box")
    assert process.stderr is not None
    assert "would not be ended by its watchdog if its executor froze: " in process.stderr.readline()
    assert is_running(watchdog)
    assert is_running(child)


def test_a_full_pipe_that_nobody_reads_does_not_save_the_worker(
    box: tuple[Recorder, Path], start: Callable[..., tuple[subprocess.Popen[str], int, int]]
) -> None:
    lease_until(box[1], time.monotonic_ns())
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write_fd, bytes(4096))
    os.set_blocking(write_fd, True)
    try:
        process, _, _ = start(box[1], stderr=write_fd)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        os.close(read_fd)
        os.close(write_fd)
