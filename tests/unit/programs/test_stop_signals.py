"""Signals request a stop; a second interrupt is raised; the earlier handlers are restored.

A command that is ended by a signal cleans up first, and no second signal interrupts that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain.programs.stop_signals import STOP_SIGNALS, StopSignals, orderly_end
from tests.helpers.require import require_module
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until

StartBuild = Callable[[], "subprocess.Popen[str]"]


def test_each_stop_signal_requests_a_stop() -> None:
    for number in STOP_SIGNALS:
        with StopSignals() as signals:
            assert not signals.is_requested
            signal.raise_signal(number)
            assert signals.is_requested
            assert signals.name == number.name


def test_later_signals_do_not_replace_the_first() -> None:
    with StopSignals() as signals:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert signals.name == "SIGUSR1"


def test_interrupt_after_another_interrupt_is_raised() -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals.name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_close_restores_the_handlers() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]

    signals = StopSignals()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    signals.close()
    signals.close()

    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_worker_that_has_saved_ends_with_its_own_exit_code() -> None:
    # The interpreter restores handlers long before the process ends, and then destroys its objects.
    script = """
import os, signal, sys
from megatrain.programs.stop_signals import STOP_SIGNALS, StopSignals
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=STOP_SIGNALS):
        for number in numbers:
            kill(pid, number)
sys.last = Last()
with StopSignals() as signals:
    signals.ignore()
sys.exit(75)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stderr) == (75, "")


def test_forked_child_has_the_earlier_handlers() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if [signal.getsignal(number) for number in STOP_SIGNALS] == before else 1)
        assert os.waitpid(pid, 0)[1] == 0


def test_first_signal_calls_back_and_the_second_interrupts() -> None:
    heard: list[str] = []
    with StopSignals(heard.append, lambda name: heard.append(f"{name} again")):
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGINT, signal.SIGINT):
            signal.raise_signal(number)
    assert heard == ["SIGHUP", "SIGINT again"]


def test_a_callback_that_is_set_after_a_signal_is_called_at_once() -> None:
    heard: list[str] = []
    with StopSignals() as signals:
        signals.set_callbacks(heard.append)
        assert heard == []
        signal.raise_signal(signal.SIGUSR1)
        signals.set_callbacks(lambda name: heard.append(f"late {name}"), heard.append)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert heard == ["SIGUSR1", "late SIGUSR1", "SIGINT"]


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert not signals.is_requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_takes_no_signals() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    made: list[StopSignals] = []
    thread = threading.Thread(target=lambda: made.append(StopSignals()))
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    made[0].close()


def test_signal_while_the_event_is_locked_is_no_deadlock() -> None:
    script = """
import os, signal
from megatrain.programs.stop_signals import stopped_by_signals
stop = stopped_by_signals()
with stop._cond:  # as at the beginning of Event.wait
    os.kill(os.getpid(), signal.SIGTERM)
print(stop.wait(10))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, timeout=DEADLINE_S, check=True, capture_output=True, text=True
    )
    assert done.stdout == "True\n"


@pytest.mark.slow(kept=["15"])
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_server_ends_in_order_by_any_stop_signal(number: signal.Signals) -> None:
    script = """
import os
from megatrain.programs.stop_signals import stopped_by_signals
stop = stopped_by_signals()
print("up", flush=True)
stop.wait(20)
print("in order")
"""
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    server.send_signal(number)
    assert server.communicate(timeout=DEADLINE_S)[0] == "in order\n"
    assert server.returncode == 0


def send(number: int) -> None:
    """Send a signal to this process; its handler runs before the next statement."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)])
def test_the_first_signal_ends_the_block_and_the_next_do_nothing(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    cleaned_up = []
    with pytest.raises(SystemExit) as end, orderly_end():
        try:
            send(number)
            pytest.fail("the signal did nothing")
        finally:
            for each in STOP_SIGNALS:
                send(each)
            cleaned_up.append(True)
    assert end.value.code == code
    assert cleaned_up
    assert capsys.readouterr().err == f"megatrain: stopped by {number.name}\n"
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


def test_an_interrupt_stays_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned_up = []
    with pytest.raises(KeyboardInterrupt), orderly_end():
        try:
            send(signal.SIGINT)
        finally:
            send(signal.SIGINT)
            cleaned_up.append(True)
    assert cleaned_up
    assert capsys.readouterr().err == ""


def staging_directories(place: Path) -> list[Path]:
    return list(place.glob(".out.part-*/new"))


@pytest.fixture
def start_build(tmp_path: Path) -> Iterator[StartBuild]:
    """Return a function that starts a build, which waits for text once its staging directory exists."""
    require_module("tokenizers")
    os.mkfifo(tmp_path / "never.txt")  # no process writes
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        words = ["data", "build", "--input", str(tmp_path / "never.txt"), "--output", str(tmp_path / "out")]
        command = [sys.executable, "-m", "megatrain", *words]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT))
        wait_until(lambda: bool(staging_directories(tmp_path)), "a staging directory")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow(kept=["15"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_build_leaves_nothing(number: signal.Signals, start_build: StartBuild, tmp_path: Path) -> None:
    process = start_build()
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number
    assert errors == f"megatrain: stopped by {number.name}\n"
    assert os.listdir(tmp_path) == ["never.txt"]


@pytest.mark.slow
def test_leftovers_of_a_killed_build_are_removed_by_the_next(start_build: StartBuild, tmp_path: Path) -> None:
    killed = start_build()
    killed.kill()
    killed.wait(timeout=DEADLINE_S)
    (left,) = staging_directories(tmp_path)
    process = start_build()
    wait_until(lambda: not left.parent.exists(), "the next build to remove what was left")
    process.terminate()
    process.wait(timeout=DEADLINE_S)
    assert os.listdir(tmp_path) == ["never.txt"]
