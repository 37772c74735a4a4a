"""A worker ends itself: tested with real black boxes, and in real workers whose executor (this test) is silent."""

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

from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import ControlPage, Identity, Phase
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain.fencing.fence import FenceAction, FenceRule
from megatrain.run_files.run_directory import black_box_path
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.training.stopping.self_fence import SelfFence
from tests.helpers.processes import is_running
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until

ROUND = 3
S = 10**9
RULE = FenceRule(lease_ttl_s=10, floor_s=5, join_timeout_s=600, save_grace_s=60)
"""30 s before the first step, 5 s after a step, 475 s until it saves, 540 s in all."""
NO_STEP = "no step of this round was completed (limit 30.0 s)"
NOTHING = (FenceAction.GO_ON, "")

# Lets the watchdog, which polls more often than elsewhere, follow its black box; starts a child in its own group, and
# completes no step. Tests end the lease only after its line: otherwise the watchdog may end it before.
WORKER = """
import pathlib, signal, subprocess, sys
from megatrain.fencing.fence import FenceRule
from megatrain.programs.stop_signals import StopSignals
from megatrain.training.stopping import watchdog as watchdog_module, watchdog_process
watchdog_process._POLL_S = 0.1
rule = FenceRule(lease_ttl_s=10, floor_s=5, join_timeout_s=600, save_grace_s=60)
watchdog = watchdog_module.start_watchdog(600, 5, rule)
signals = StopSignals(lambda name: print(name, flush=True))
watchdog.follow(pathlib.Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(watchdog.pid, child.pid, flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[tuple[Recorder, Path]]:
    identity = Identity("demo", "main", ROUND, 5, Layout(dp_size=8), os.getpid(), "host-1")
    recorder = open_recorder(identity, directory=str(tmp_path), run_key="key", num_records=64)
    yield recorder, black_box_path(tmp_path, "demo", "key", "main", ROUND, 5)
    recorder.close()


def lease_gone(
    path: Path, seconds: float, round_number: int = ROUND, interval_s: float = 0.0, stop_s: float = 0.0
) -> None:
    """Record that the lease ended `seconds` ago; a negative number means that it is valid for that long."""
    until_ns = time.monotonic_ns() - int(seconds * S)
    page = ControlPage(
        lease_ok_until_ns=until_ns, round=round_number, interval_ns=int(interval_s * S), stop_ns=int(stop_s * S)
    )
    write_control(path, page)


def polled(fence: SelfFence, count: int = 3) -> list[tuple[FenceAction, str]]:
    return [fence.poll() for _ in range(count)]


def test_a_worker_without_an_executor_is_left_alone(box: tuple[Recorder, Path]) -> None:
    assert polled(SelfFence(box[1], RULE)) == [NOTHING] * 3


@pytest.mark.parametrize("gone_s", [-600.0, 20.0])
def test_worker_is_left_alone_before_its_first_step(box: tuple[Recorder, Path], gone_s: float) -> None:
    lease_gone(box[1], gone_s)
    assert polled(SelfFence(box[1], RULE)) == [NOTHING] * 3


def test_worker_without_lease_and_steps_ends_at_the_second_check(box: tuple[Recorder, Path]) -> None:
    lease_gone(box[1], 31.0)
    first, (action, reason), _ = polled(SelfFence(box[1], RULE))
    assert first == NOTHING
    assert action is FenceAction.STOP
    assert reason.endswith(NO_STEP)


def test_worker_that_completes_steps_runs_until_it_must_save(box: tuple[Recorder, Path]) -> None:
    recorder, path = box
    fence = SelfFence(path, RULE)
    lease_gone(path, 400.0)
    assert fence.poll() == NOTHING
    recorder.set_step(0)
    recorder.complete_step()
    assert polled(fence) == [NOTHING] * 3
    lease_gone(path, 480.0)
    assert [action for action, _ in polled(fence)] == [FenceAction.GO_ON, FenceAction.SAVE, FenceAction.SAVE]
    lease_gone(path, 541.0)
    assert [action for action, _ in polled(fence)] == [FenceAction.GO_ON, FenceAction.STOP, FenceAction.STOP]
    # long steps have the time that was published to all hosts
    lease_gone(path, 541.0, interval_s=600.0)
    assert polled(fence) == [NOTHING] * 3


def test_worker_with_a_long_stop_saves_earlier(box: tuple[Recorder, Path]) -> None:
    recorder, path = box
    recorder.set_step(0)
    recorder.complete_step()
    lease_gone(path, 400.0)
    assert polled(SelfFence(path, RULE)) == [NOTHING] * 3
    lease_gone(path, 400.0, stop_s=200.0)
    assert [action for action, _ in polled(SelfFence(path, RULE))] == [
        FenceAction.GO_ON,
        FenceAction.SAVE,
        FenceAction.SAVE,
    ]


@pytest.mark.parametrize(("round_number", "is_over"), [(ROUND - 1, False), (ROUND, False), (ROUND + 1, True)])
def test_worker_of_an_older_round_ends_despite_progress(
    box: tuple[Recorder, Path], round_number: int, is_over: bool
) -> None:
    lease_gone(box[1], -600.0, round_number)
    _, second, _ = polled(SelfFence(box[1], RULE))
    wanted = "this host fenced itself: it has reached round 4, and this worker belongs to round 3"
    assert second == ((FenceAction.STOP, wanted) if is_over else NOTHING)


def test_lost_black_box_is_named_in_the_error(box: tuple[Recorder, Path]) -> None:
    fence = SelfFence(box[1], RULE)
    os.truncate(box[1], 10)
    with pytest.raises(DataError, match=box[1].name):
        fence.poll()
    with pytest.raises(DataError, match="no-box"):
        SelfFence(box[1].with_name("no-box"), RULE)


@pytest.fixture
def start() -> Iterator[Callable[[Path], tuple[subprocess.Popen[str], int, int]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(
        path: Path, *, has_own_group: bool = True, stderr: int = subprocess.PIPE
    ) -> tuple[subprocess.Popen[str], int, int]:
        """Return a worker, and the process ids of its watchdog and of its child."""
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


def test_watchdog_ends_the_group_of_a_silent_executor(
    box: tuple[Recorder, Path], start: Callable[..., tuple[subprocess.Popen[str], int, int]]
) -> None:
    process, watchdog, child = start(box[1])
    lease_gone(box[1], 31.0)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    assert errors.startswith(f"megatrain: rank 5 (process {process.pid}) is ended by its watchdog: this host fenced ")
    assert errors.endswith(f"{NO_STEP}\n")
    assert errors.count("\n") == 1
    wait_until(lambda: not (is_running(child) or is_running(watchdog)), "the end of the group")


def test_watchdog_requests_a_save_after_long_without_a_lease(
    box: tuple[Recorder, Path], start: Callable[..., tuple[subprocess.Popen[str], int, int]]
) -> None:
    recorder, path = box
    recorder.set_phase(Phase.STOPPING)  # in phases without steps
    process, _, _ = start(path)
    lease_gone(path, 480.0)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "SIGTERM\n"
    assert "gets SIGTERM from its watchdog, to save and stop: this host fenced itself" in process.stderr.readline()


def test_watchdog_ends_only_the_worker_in_a_foreign_group(
    box: tuple[Recorder, Path], start: Callable[..., tuple[subprocess.Popen[str], int, int]]
) -> None:
    process, _, child = start(box[1], has_own_group=False)
    try:
        lease_gone(box[1], 31.0)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == -signal.SIGKILL
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_watchdog_without_a_black_box_stays_and_reports_it(
    tmp_path: Path, start: Callable[..., tuple[subprocess.Popen[str], int, int]]
) -> None:
    process, watchdog, child = start(tmp_path / "no-box")
    assert process.stderr is not None
    assert " will not end it if the executor freezes: " in process.stderr.readline()
    assert is_running(watchdog)
    assert is_running(child)


def test_full_unread_pipe_does_not_save_the_worker(
    box: tuple[Recorder, Path], start: Callable[..., tuple[subprocess.Popen[str], int, int]]
) -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write_fd, bytes(4096))
    os.set_blocking(write_fd, True)
    try:
        process, _, _ = start(box[1], stderr=write_fd)
        lease_gone(box[1], 31.0)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        os.close(read_fd)
        os.close(write_fd)
