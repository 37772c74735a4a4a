"""Signals that ask a command to end: it cleans up first, and no second signal breaks that off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain.programs.stop_signals import STOP_SIGNALS, orderly_end
from tests.helpers.require import require_module
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until

StartBuild = Callable[[], "subprocess.Popen[str]"]


def send(number: int) -> None:
    """Send a signal to this very process; its handler runs before the next statement."""
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
    """Return a function that starts a build, which waits for text once its staging directory is there."""
    require_module("tokenizers")
    os.mkfifo(tmp_path / "never.txt")  # no process writes
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        arguments = ["data", "build", "--input", str(tmp_path / "never.txt"), "--output", str(tmp_path / "out")]
        command = [sys.executable, "-m", "megatrain", *arguments]
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
