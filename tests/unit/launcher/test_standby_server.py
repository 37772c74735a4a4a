"""Workers forked from a standby server behave and end like separate programs; each has a parent-death guard."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain.programs.processes import process_stat
from megatrain_launcher.standby.client import StandbyClient, StandbyError
from megatrain_launcher.standby.messages import READY, WorkerStart, receive_message, send_message
from tests.helpers.processes import is_running
from tests.helpers.source_tree import ROOT
from tests.helpers.standby_workers import STAYS, Programs, programs, read_line, wait_until_gone
from tests.helpers.waiting import DEADLINE_S, wait_until

WITH_GRANDCHILD = """
    import os, signal, subprocess
    inside = subprocess.Popen(["sleep", "600"])
    outside = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(inside.pid, outside.pid)
    signal.pause()
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """One server for all tests that do not change it."""
    with programs(tmp_path_factory.mktemp("programs")) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Programs]:
    with programs(tmp_path / "own") as made:
        yield made


def test_worker_has_its_own_environment_and_arguments(shared: Programs) -> None:
    text, found = shared.run(
        """
        import json, os, sys
        reported = {
            "arguments": sys.argv[1:], "program": sys.argv[0], "environment": dict(os.environ), "name": __name__,
            "directory": os.getcwd(), "comm": open("/proc/self/comm").read().strip(),
            "group": os.getpgrp() == os.getpid(), "main": sys.modules["__main__"].__dict__ is globals(),
        }
        print(json.dumps(reported))
        """,
        "--a",
        "b c",
        rank=12345,
        A="1",
        ODD="\udcff=\n",
    )
    reported = json.loads(text)
    assert reported["arguments"] == ["--a", "b c"]
    assert Path(reported["program"]).parent == shared.directory
    assert reported["environment"] == {"A": "1", "ODD": "\udcff=\n"}
    assert Path(reported["directory"]) == shared.directory
    assert (reported["name"], reported["comm"], reported["group"], reported["main"]) == (
        "__main__",
        "mt-rank-12345",
        True,
        True,
    )
    assert found.exit_code == 0


def test_signals_and_garbage_collection_are_as_in_a_new_python(shared: Programs) -> None:
    """The server disables the collection while it loads modules; a worker would never free its cycles."""
    source = """
        import gc, signal
        print(gc.isenabled(), gc.get_threshold())
        print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)])
        print(signal.set_wakeup_fd(-1), [line for line in open("/proc/self/status") if line.startswith("Sig")])
    """
    text, _ = shared.run(source)
    fresh = subprocess.run([sys.executable, "-m", shared.write(source)], cwd=shared.directory, capture_output=True)
    ours, theirs = (re.sub(r" at 0x\w+|SigQ:[^']*", "", reported) for reported in (text, fresh.stdout.decode()))
    assert ours == theirs


def test_hangup_ends_nothing_that_nohup_started(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with programs(tmp_path / "own") as own:
            pid, read_fd = own.start(
                """
                import os, signal
                signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"heard\\n"))
                print("up")
                while True:
                    signal.pause()
                """
            )
            assert read_line(read_fd) == "up"
            server = own.client.pid
            assert server is not None
            for number in (signal.SIGHUP, signal.SIGUSR1):
                os.killpg(pid, number)
            assert read_line(read_fd) == "heard"
            os.kill(server, signal.SIGHUP)
            assert own.run("print('later')")[0] == "later\n"
            assert own.client.pid == server
            os.close(read_fd)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_keeps_its_order_and_is_not_buffered(shared: Programs) -> None:
    pid, read_fd = shared.start(
        """
        import signal, sys
        print("one")
        print("two", file=sys.stderr)
        print("three")
        signal.pause()
        """
    )
    assert [read_line(read_fd) for _ in range(3)] == ["one", "two", "three"]
    shared.client.kill([pid])
    os.close(read_fd)


EXIT_CODES = {
    "pass": 0,
    "raise SystemExit(75)": 75,
    "raise SystemExit('words')": 1,
    "raise SystemExit(None)": 0,
    "import os; os._exit(7)": 7,
    "raise ValueError('no')": 1,
    "import os; os.abort()": -signal.SIGABRT,
    "import ctypes; ctypes.string_at(0)": -signal.SIGSEGV,
    "import os; os.kill(os.getpid(), 9)": -signal.SIGKILL,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import sys, threading; threading.Thread(target=lambda: print('late')).start(); sys.exit(3)": 3,
}


def test_exit_codes_are_those_of_the_program(shared: Programs) -> None:
    started = {source: shared.start(source) for source in EXIT_CODES}
    found = {}
    for source, (pid, read_fd) in started.items():
        with open(read_fd) as output:
            output.read()
        found[source] = shared.exit_of(pid).exit_code
    assert found == EXIT_CODES


def test_worker_that_ended_before_a_kill_was_not_killed(own: Programs) -> None:
    """The server is slow: the order to kill arrives before it has noticed the exit."""
    waits = "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(9)); print('up'); signal.pause()"
    dying, read_fd = own.start(waits, rank=1)
    sleeping, other_fd = own.start(STAYS, rank=2)
    assert (read_line(read_fd), read_line(other_fd)) == ("up", "up")
    server = own.client.pid
    assert server is not None
    os.kill(server, signal.SIGSTOP)
    killing = threading.Thread(target=own.client.kill_all)
    try:
        os.kill(dying, signal.SIGUSR1)
        wait_until(lambda: not is_running(dying), "the worker's end")
        killing.start()
    finally:
        os.kill(server, signal.SIGCONT)
    killing.join(DEADLINE_S)
    found = own.exit_of(dying)
    assert (found.exit_code, found.is_killed) == (9, False)
    found = own.exit_of(sleeping)
    assert (found.exit_code, found.is_killed) == (-signal.SIGKILL, True)


def test_traceback_shows_the_program_only(shared: Programs) -> None:
    text, _ = shared.run(
        """
        def fail():
            raise ValueError("no such thing")
        fail()
        """
    )
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: no such thing\n")
    assert text.count('  File "') == 2
    assert "megatrain_launcher" not in text


def test_missing_module_is_reported_in_its_log(shared: Programs, tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    (pid,) = shared.client.start_workers([WorkerStart(0, "no_such_module", (), {}, str(tmp_path))], [write_fd])
    os.close(write_fd)
    with open(read_fd) as output:
        assert "No module named no_such_module" in output.read()
    assert shared.exit_of(pid).exit_code == 1


def test_ended_worker_is_a_zombie_until_its_group_is_killed(shared: Programs) -> None:
    _, found = shared.run("pass")
    stat = process_stat(found.pid)
    assert stat is not None
    assert stat.state == "Z"
    shared.client.kill_all()
    assert shared.client.wait_gone(DEADLINE_S)
    assert process_stat(found.pid) is None


def test_signal_reaches_a_worker_alone_and_kill_its_group(own: Programs) -> None:
    signaled, first_fd = own.start(WITH_GRANDCHILD, rank=0, PATH=os.environ["PATH"])
    killed, second_fd = own.start(WITH_GRANDCHILD, rank=1, PATH=os.environ["PATH"])
    children = [list(map(int, read_line(read_fd).split())) for read_fd in (first_fd, second_fd)]
    own.client.signal_workers([signaled, 1], signal.SIGTERM)
    assert own.exit_of(signaled).exit_code == -signal.SIGTERM
    assert all(is_running(inside) for inside, _ in children)
    own.client.kill_all()
    assert own.client.wait_gone(DEADLINE_S)
    for pid in (signaled, killed, *(inside for inside, _ in children)):
        assert process_stat(pid) is None  # the server collected the orphans
    for _, outside in children:
        assert is_running(outside)
        os.kill(outside, signal.SIGKILL)
        wait_until(lambda outside=outside: process_stat(outside) is None, "the server to collect the orphan")
    os.close(first_fd)
    os.close(second_fd)


def test_stuck_workers_are_killed(own: Programs) -> None:
    sources = [
        "import os, signal; print('up'); os.kill(os.getpid(), signal.SIGSTOP)",
        # a C call that never releases the interpreter lock
        """
        import ctypes, signal
        signal.signal(signal.SIGTERM, lambda *_: None)
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex)
        print("up")
        lock(mutex)
        """,
        "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; print('up'); signal.pause()",
    ]
    workers = [own.start(source, rank=rank) for rank, source in enumerate(sources)]
    pids = [pid for pid, _ in workers]
    for _, read_fd in workers:
        assert read_line(read_fd) == "up"
    own.client.signal_workers(pids, signal.SIGTERM)
    assert own.client.living == set(pids)
    own.client.kill_all()
    assert own.client.wait_gone(DEADLINE_S)
    for pid, read_fd in workers:
        assert process_stat(pid) is None
        os.close(read_fd)


def test_dead_server_is_noticed_and_replaced(own: Programs) -> None:
    changes = threading.Event()
    own.client.set_change_callback(changes.set)
    pid, read_fd = own.start(WITH_GRANDCHILD, PATH=os.environ["PATH"])
    inside, outside = map(int, read_line(read_fd).split())
    server_pid = own.client.pid
    assert server_pid is not None
    os.kill(server_pid, signal.SIGKILL)
    found = own.exit_of(pid)
    assert found.exit_code == -signal.SIGKILL
    assert "standby server died" in found.note
    assert changes.is_set()
    assert own.client.wait_gone(DEADLINE_S)
    wait_until_gone(pid, inside)
    assert own.run("print('again')")[0] == "again\n"
    assert own.client.pid != server_pid
    os.kill(outside, signal.SIGKILL)
    os.close(read_fd)


@contextmanager
def started_executor(directory: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """An executor in a process of its own, and the processes that must end with it."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.standby_executor", str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as executor:
        assert executor.stdout is not None
        reported = json.loads(executor.stdout.readline())
        try:
            yield executor, reported["pids"]
        finally:
            executor.kill()
            os.kill(reported["outside"], signal.SIGKILL)


def test_executor_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with started_executor(tmp_path) as (executor, pids):
        executor.kill()
        executor.wait()
        wait_until_gone(*pids)


def test_preload_output_stays_out_of_worker_streams(tmp_path: Path) -> None:
    (tmp_path / "loud_preload.py").write_text("import sys\nfor s in (sys.stdout, sys.stderr): print('loud', file=s)\n")
    saved = os.dup(2)
    with open(tmp_path / "stderr", "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        with StandbyClient(preload=("loud_preload",), directory=tmp_path) as client:
            made = Programs(client, tmp_path)
            text, _ = made.run("import sys; print('one'); print('\u00e4', file=sys.__stderr__); print('two')")
    finally:
        os.dup2(saved, 2)
        os.close(saved)
    assert text == "one\n\u00e4\ntwo\n"
    assert (tmp_path / "stderr").read_text() == "loud\nloud\n"


def test_worker_dies_with_its_server_without_help(tmp_path: Path) -> None:
    with started_executor(tmp_path) as (executor, (worker, inside, server)):
        executor.send_signal(signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        wait_until_gone(worker)
        executor.send_signal(signal.SIGCONT)
        wait_until_gone(inside)  # The executor removed it.


def test_preload_that_fails_is_reported(tmp_path: Path) -> None:
    (tmp_path / "bad_preload.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "good.py").write_text("print('fine')\n")
    with StandbyClient(preload=("bad_preload",), directory=tmp_path) as client:
        assert client.wait_ready(DEADLINE_S)
        assert "bad_preload cannot be imported in advance (RuntimeError: not today)" in client.problem
        made = Programs(client, tmp_path)
        assert made.run("print('fine')")[0] == "fine\n"


@pytest.mark.slow
def test_preload_that_kills_the_server_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "deadly_preload.py").write_text("import os; os.abort()\n")
    with StandbyClient(preload=("deadly_preload",), directory=tmp_path) as client:
        made = Programs(client, tmp_path)
        assert made.run("print('fine')")[0] == "fine\n"
        assert "importing deadly_preload crashes the standby server" in client.problem


def test_request_before_the_server_is_ready_waits(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    (tmp_path / "slow_preload.py").write_text(f"open({str(go)!r}).read()\nvalue = 42\n")
    made = tmp_path / "made"
    made.mkdir()
    with StandbyClient(preload=("slow_preload",), directory=tmp_path) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(Programs(client, made).run, "import sys; print(sys.modules['slow_preload'].value)")
        wait_until(lambda: any(made.iterdir()), "the request")
        assert not client.wait_ready(0.0)
        go.write_text("")
        assert asked.result()[0] == "42\n"


def test_stopped_server_is_killed_when_it_does_not_answer(own: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_launcher.standby.client._KILL_TIMEOUT_S", 0.2)
    pid, read_fd = own.start(STAYS)
    assert own.client.pid is not None
    os.kill(own.client.pid, signal.SIGSTOP)
    own.client.kill_all()
    assert own.client.wait_gone(DEADLINE_S)
    wait_until_gone(pid)
    os.close(read_fd)


def test_closed_client_starts_nothing(tmp_path: Path) -> None:
    client = StandbyClient(preload=())
    assert client.wait_ready(DEADLINE_S)
    pid = client.pid
    assert pid is not None
    client.close()
    client.close()
    assert process_stat(pid) is None
    with pytest.raises(StandbyError):
        client.start_workers([WorkerStart(0, "good", (), {}, str(tmp_path))], [2])


def test_large_environment_and_many_workers_arrive(shared: Programs) -> None:
    large = {f"NAME_{number}": "x" * 100_000 for number in range(10)}
    module = shared.write("import os; print(sum(map(len, os.environ.values())))")
    starts = [WorkerStart(rank, module, (), large, str(shared.directory)) for rank in range(8)]
    pipes = [os.pipe() for _ in starts]
    pids = shared.client.start_workers(starts, [write_fd for _, write_fd in pipes])
    assert len(set(pids)) == 8
    for read_fd, write_fd in pipes:
        os.close(write_fd)
        with open(read_fd) as output:
            assert output.read() == "1000000\n"
    assert {shared.exit_of(pid).exit_code for pid in pids} == {0}


def test_standby_server_without_executor_ends_its_workers(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    (tmp_path / "sleeper.py").write_text(STAYS)
    command = [sys.executable, "-m", "megatrain_launcher.standby", str(theirs.fileno()), str(os.getpid()), "none"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()], cwd=ROOT)
    theirs.close()
    assert receive_message(ours) == ({"kind": READY, "problems": []}, None)
    read_fd, write_fd = os.pipe()
    start = WorkerStart(0, "sleeper", (), {}, str(tmp_path)).to_message()
    for _ in range(8):
        send_message(ours, start, write_fd)
    os.close(write_fd)
    pids = [message[0]["pid"] for _ in range(8) if (message := receive_message(ours)) is not None]
    ours.close()
    _, errors = server.communicate(timeout=DEADLINE_S)
    assert (server.returncode, errors) == (0, b"")
    os.close(read_fd)
    wait_until_gone(*pids)
