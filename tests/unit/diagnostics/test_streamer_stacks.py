"""Stacks of real processes: with the GIL held, stopped, dead, and without support for stack dumps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.run_files.run_directory import own_box_directory
from megatrain.telemetry.recorder import open_recorder
from megatrain_diagnostics.events.tables import Stacks, num_rows
from megatrain_diagnostics.streamer.stacks import (
    DumpTarget,
    StackWatch,
    collect_stacks,
    parse_dump,
    process_state_text,
    targets_in,
)
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until

WORKER = """
import ctypes, os, sys, threading
from megatrain.programs.stack_dumps import stacks_on_demand

def sleeps(word=""):
    print(word, end="", flush=True)
    threading.Event().wait(600)

def reads(word):
    print(word, end="", flush=True)
    print(os.read(0, 100).decode(), end="")

def holds_the_lock(word):
    print(word, end="", flush=True)
    ctypes.PyDLL(None).sem_wait(ctypes.create_string_buffer(64))

with stacks_on_demand():
    threading.Thread(target=sleeps, name="loader", daemon=True).start()
    globals()[sys.argv[1]]("ready\\n")
"""
DEAF = """
import os, signal
file = os.memfd_create("megatrain-stacks")
print("ready", flush=True)
signal.pause()
"""
BARE = "import signal; print('ready', flush=True); signal.pause()"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a Python program, and waits until it reports that it is ready; all are ended after
    the test."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def target(process: subprocess.Popen[str], rank: int = 0) -> DumpTarget:
    return DumpTarget(rank, 4, process.pid)


def rows_of(stacks: Stacks, rank: int) -> dict[str, str]:
    return {
        str(stacks.thread[row]): str(stacks.stack[row]) for row in range(num_rows(stacks)) if stacks.rank[row] == rank
    }


def test_process_with_a_held_gil_dumps_its_stacks(start: Start) -> None:
    stuck, asleep = start(WORKER, "holds_the_lock"), start(WORKER, "sleeps")
    for number in (1, 100):  # again: the file of dumps grows, and only the new part counts
        stacks = collect_stacks([target(stuck, 0), target(asleep, 1)], "host-a", number, time.time_ns)
        assert rows_of(stacks, 0)["MainThread"].splitlines()[-1].endswith(" holds_the_lock")
        assert rows_of(stacks, 1)["MainThread"].splitlines()[0].endswith(" <module>")
        assert " sleeps" in rows_of(stacks, 1)["MainThread"]
        assert num_rows(stacks) == 4
        assert stacks.sequence.tolist() == list(range(number, number + 4))
        assert set(stacks.host) == {"host-a"}
        assert set(stacks.round.tolist()) == {4}
    assert stuck.poll() is None
    assert asleep.poll() is None


def test_unresponsive_process_is_reported_and_not_ended(start: Start) -> None:
    stopped, bare, gone, deaf = start(WORKER, "sleeps"), start(BARE), start(BARE), start(DEAF)
    os.kill(stopped.pid, signal.SIGSTOP)
    wait_until(lambda: "(T)" in process_state_text(stopped.pid), "the stop")
    gone.kill()
    gone.wait()
    stacks = collect_stacks(
        [target(stopped, 0), target(bare, 1), target(gone, 2), target(deaf, 3)], "host-a", 1, time.time_ns
    )
    assert rows_of(stacks, 0) == {"MainThread": "process is stopped (T)"}
    assert rows_of(stacks, 1) == {"MainThread": "the process does not support stack dumps"}
    assert rows_of(stacks, 2) == {"MainThread": "process is gone"}
    assert rows_of(stacks, 3) == {"MainThread": "the process does not support stack dumps"}
    assert bare.poll() is None
    assert deaf.poll() is None, "a signal that it has no handler for ends a process"


def test_dump_does_not_disturb_the_process(start: Start) -> None:
    asked = start(WORKER, "reads")
    for number in range(3):
        stacks = collect_stacks([target(asked)], "host-a", number, time.time_ns)
        assert " reads" in rows_of(stacks, 0)["MainThread"], "it is asked while it waits in the kernel"
    output, _ = asked.communicate("a word", timeout=DEADLINE_S)
    assert asked.returncode == 0
    assert output == "a word", "the read is not cut short"


def test_watch_dumps_the_ranks_of_this_host_and_round(start: Start, tmp_path: Path) -> None:
    process = start(WORKER, "sleeps")
    layout = Layout(dp_size=3)
    recorders = [
        open_recorder(
            Identity("demo", "main", round_number, rank, layout, process.pid, host),
            directory=str(tmp_path),
            run_key="key",
            num_records=64,
        )
        for round_number, rank, host in ((5, 0, "host-a"), (6, 1, "host-a"), (6, 2, "host-b"))
    ]
    (own_box_directory(tmp_path) / "megatrain.demo.damaged.blackbox").write_bytes(b"x")
    assert targets_in(tmp_path, "megatrain.demo.", "host-a") == (DumpTarget(1, 6, process.pid),)
    assert targets_in(tmp_path, "megatrain.other.", "host-a") == ()
    sent: list[Stacks] = []
    watch = StackWatch(
        "host-a", lambda: targets_in(tmp_path, "", "host-a"), lambda _, stacks: sent.append(stacks), time.time_ns
    )
    watch.request((1,))
    watch.request((1,))
    watch.close()
    assert len(sent) == 1, "not again at once"
    assert rows_of(sent[0], 1)["MainThread"]
    for recorder in recorders:
        recorder.close()


def test_stack_dump_is_parsed_outermost_first() -> None:
    text = (
        'Thread 0x00007f01 (most recent call first):\n  File "/a/b.py", line 3 in inner\n'
        '  File "/a/c.py", line ??? in outer\n\n'
        'Current thread 0x00007f02 (most recent call first):\n  Garbage-collecting\n  File "/a/d.py", line 9 in main\n'
    )
    first, main = parse_dump(text)
    assert (first.thread, first.stack) == ("Thread 0x00007f01", "/a/c.py:0 outer\n/a/b.py:3 inner")
    assert (main.thread, main.stack) == ("MainThread", "/a/d.py:9 main\nGarbage-collecting")
    assert parse_dump("") == []
    assert parse_dump("Fatal nonsense\n") == []
