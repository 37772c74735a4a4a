"""The watchdog with real workers in separate processes: running ones, stuck ones, groups and forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.processes import is_running
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until

LONG_S = 600.0

# Every worker prints its watchdog's process id, then runs the test's code.
START = """
import ctypes, os, select, signal, sys, time
from megatrain.training.stopping.watchdog import start_watchdog
from megatrain.programs.stop_signals import StopSignals

def say(text):
    print(text, flush=True)

def run_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.005)

def get_stuck():
    # A mutex locked twice, by a call that keeps the interpreter lock: no signal gets the thread out of it.
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    say("stuck")
    library.pthread_mutex_lock(mutex)

watchdog = start_watchdog(GRACE_S, 11)
signals = StopSignals()
say(watchdog.pid)
""".replace("DEADLINE_S", str(DEADLINE_S))


class Worker:
    """A worker process in a separate group."""

    def __init__(self, body: str, grace_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", START.replace("GRACE_S", str(grace_s)) + body],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        self.pid = self.process.pid
        self.watchdog_pid = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        """Wait for the end and return exit status and stderr. Returns only when the watchdog has closed stderr as
        well."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors


@contextmanager
def worker(body: str, grace_s: float = LONG_S) -> Iterator[Worker]:
    started = Worker(body, grace_s)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.communicate()
        wait_until(lambda: not is_running(started.watchdog_pid), "the end of the watchdog")


@pytest.mark.slow(kept=["SIGTERM"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda one: one.name)
def test_a_free_worker_stops_by_itself(number: signal.Signals) -> None:
    body = "say('runs'); run_until(lambda: signals.is_requested); say(signals.name); watchdog.close(); sys.exit(75)"
    with worker(body) as free:
        assert free.line() == "runs"
        os.kill(free.pid, number)
        assert free.line() == number.name
        assert free.end() == (75, "")


def test_a_stuck_worker_is_killed_after_the_grace_period() -> None:
    with worker("get_stuck()", grace_s=0.3) as stuck:
        assert stuck.line() == "stuck"
        signaled = time.monotonic()
        os.kill(stuck.pid, signal.SIGTERM)
        status, errors = stuck.end()

        assert time.monotonic() - signaled >= 0.3
        assert status == -signal.SIGKILL
        assert errors == (
            f"megatrain: rank 11 (process {stuck.pid}) got SIGTERM, but did not finish its step within "
            "0.3 s (runtime.save_grace_s=0.3; a step longer than two thirds of it gets twice its time); its watchdog "
            "kills it without a save\n"
        )


def test_worker_with_long_steps_gets_twice_a_step(tmp_path: Path) -> None:
    """The duration of its step is in its black box, which the watchdog follows."""
    body = f"""
from pathlib import Path
from megatrain.contracts.black_box.encoding import Word
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.telemetry.recorder import open_recorder
recorder = open_recorder(
    Identity("demo", "main", 0, 0, Layout(), os.getpid(), "host"), directory={str(tmp_path)!r}, run_key="k",
    num_records=64)
recorder._words[Word.MEDIAN_STEP_NS] = 300_000_000
watchdog.follow(recorder.path)
get_stuck()
"""
    with worker(body, grace_s=0.1) as stuck:
        assert stuck.line() == "stuck"
        signaled = time.monotonic()
        os.kill(stuck.pid, signal.SIGTERM)
        status, errors = stuck.end()
        assert time.monotonic() - signaled >= 0.6
    assert status == -signal.SIGKILL
    assert "within 0.6 s (runtime.save_grace_s=0.1; a step longer than two thirds of it gets twice its time)" in errors


def test_stuck_worker_without_a_signal_is_left_alone() -> None:
    with worker("get_stuck()", grace_s=0.0) as stuck:
        assert stuck.line() == "stuck"
        # The signal affects a worker; sent to the watchdog alone, it has no effect.
        os.kill(stuck.watchdog_pid, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            stuck.process.wait(0.1)
        assert is_running(stuck.watchdog_pid)


def test_signals_to_the_group_do_not_end_the_watchdog() -> None:
    with worker("get_stuck()", grace_s=0.1) as stuck:
        assert stuck.line() == "stuck"
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            os.killpg(stuck.pid, number)
        status, errors = stuck.end()

        assert status == -signal.SIGKILL
        assert errors.startswith("megatrain: rank 11 ")


def test_a_kill_of_the_group_takes_the_watchdog_along() -> None:
    with worker("get_stuck()") as stuck:
        os.killpg(stuck.pid, signal.SIGKILL)
        assert stuck.end() == (-signal.SIGKILL, "")
        wait_until(lambda: not is_running(stuck.watchdog_pid), "the end of the watchdog")


@pytest.mark.slow(kept=["sys.exit(3)-3", "os.kill(os.getpid(), 9)--9"])
@pytest.mark.parametrize(
    ("body", "status"),
    [("sys.exit(3)", 3), ("raise SystemExit", 0), ("os.kill(os.getpid(), 9)", -9), ("os._exit(4)", 4)],
)
def test_the_watchdog_ends_with_its_worker(body: str, status: int) -> None:
    with worker(body) as ended:
        assert ended.end() == (status, "")
        wait_until(lambda: not is_running(ended.watchdog_pid), "the end of the watchdog")


def test_watchdog_ends_with_its_worker_despite_an_open_pipe() -> None:
    # A fork that Python does not see keeps every descriptor open.
    body = """
child = ctypes.CDLL(None).fork()
if child == 0:
    os.close(1), os.close(2)
    select.select([], [], [], 600)
    os._exit(0)
say(child)
os._exit(0)
"""
    with worker(body) as ended:
        child = int(ended.line())
        try:
            assert ended.end() == (0, "")
            wait_until(lambda: not is_running(ended.watchdog_pid), "the end of the watchdog")
            assert is_running(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_close_leaves_no_child_and_restores_the_wakeup_fd() -> None:
    body = """
watchdog.close()
watchdog.close()
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    say("none")
try:
    watchdog.extend(1)
except RuntimeError as error:
    say(error)
assert signal.set_wakeup_fd(-1) == -1
read_fd, write_fd = os.pipe()
os.set_blocking(write_fd, False)
signal.set_wakeup_fd(write_fd)
start_watchdog(1, 0).close()
signal.raise_signal(signal.SIGUSR1)
say(os.read(read_fd, 9) == bytes([signal.SIGUSR1]))
"""
    with worker(body) as closed:
        assert [closed.line() for _ in range(3)] == ["none", "the watchdog is closed", "True"]
        assert closed.end() == (0, "")


def test_announced_work_extends_the_grace_period() -> None:
    body = "say(time.monotonic()); watchdog.extend(0.4); get_stuck()"
    with worker(body, grace_s=0.1) as stuck:
        announced = float(stuck.line())
        assert stuck.line() == "stuck"
        os.kill(stuck.pid, signal.SIGTERM)
        assert stuck.end()[0] == -signal.SIGKILL
        assert time.monotonic() - announced >= 0.5


def test_signals_of_forked_children_do_not_stop_the_worker() -> None:
    body = """
child = os.fork()
if child == 0:
    select.select([], [], [], 600)
    os._exit(0)
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM, "the child has the worker's handler"
child = os.fork()
if child == 0:
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    signal.raise_signal(signal.SIGUSR1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
end = time.monotonic() + 0.2
run_until(lambda: time.monotonic() > end)
say(signals.is_requested)
"""
    with worker(body, grace_s=0.05) as parent:
        assert parent.line() == "False"
        assert parent.end() == (0, "")


def test_watchdog_keeps_no_file_of_the_worker_open() -> None:
    body = "file = open(os.devnull); watchdog.close(); watchdog = start_watchdog(9, 0); say(watchdog.pid); get_stuck()"
    with worker(body) as stuck:
        stuck.watchdog_pid = int(stuck.line())
        assert stuck.line() == "stuck"
        directory = Path(f"/proc/{stuck.watchdog_pid}/fd")
        wait_until(
            lambda: {path.name for path in directory.iterdir()} == {"0", "1", "2", "3"},
            "the watchdog to close its files",
        )
        assert [os.readlink(directory / name) for name in "01"] == [os.devnull] * 2
        assert os.readlink(directory / "2") == os.readlink(f"/proc/{stuck.pid}/fd/2")


def test_a_dead_watchdog_does_not_affect_the_worker() -> None:
    body = """
os.kill(watchdog.pid, 9)
os.waitpid(watchdog.pid, 0)
watchdog.extend(1)
watchdog.close()
say("alive")
"""
    with worker(body) as widow:
        assert widow.line() == "alive"
        status, errors = widow.end()
        assert status == 0
        assert "accepts no commands (" in errors


def test_watchdog_module_imports_no_torch() -> None:
    script = "import megatrain.training.stopping.watchdog, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "numpy", "asyncio", "multiprocessing", "tomllib"}


def test_workers_are_asked_to_stop_when_their_launcher_is_gone() -> None:
    worker_script = f"""
import os, select, signal, time
launcher_pid = os.getppid()
from megatrain.training.stopping.watchdog import install_launcher_death_guard
from megatrain.programs.stop_signals import StopSignals
with StopSignals() as signals:
    install_launcher_death_guard(launcher_pid)
    print(os.getpid(), flush=True)
    deadline = time.monotonic() + {DEADLINE_S}
    while not signals.is_requested and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    print(signals.name, flush=True)
"""
    script = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {worker_script!r}]).wait()
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert launcher.stdout is not None
    try:
        assert int(launcher.stdout.readline()) > 0
        launcher.kill()
        assert launcher.stdout.readline() == "SIGTERM\n"
    finally:
        launcher.kill()
        launcher.communicate()
