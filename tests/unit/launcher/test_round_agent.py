"""An agent runs the rounds that it is ordered to run: real workers, with orders and listener of the test."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatrain.contracts.process import process_from_environment
from megatrain.contracts.records.rounds import Rollback, Round, RoundDeadlines, RoundHost
from megatrain_job.failures.verdict import Label
from megatrain_launcher.agent import AgentSettings, RoundAgent
from megatrain_launcher.interfaces import Assignment
from megatrain_launcher.logs.worker_logs import WorkerLogs, rank_log_path
from megatrain_launcher.standby.client import StandbyClient
from megatrain_launcher.worker_environment import server_environment, worker_environment
from tests.helpers.manual_orders import ManualOrders, ReportRecorder
from tests.helpers.standby_workers import wait_until_gone
from tests.helpers.waiting import DEADLINE_S, wait_until

PROGRAM = """
import ctypes, os, signal, subprocess, sys
from contextlib import suppress
from pathlib import Path

rank, number = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def save(*_):
    print("saved")
    sys.exit(75)

def meet():
    # a named pipe opens at neither end until both ranks open it
    Path(f"up-{number}-{rank}").touch()
    with suppress(FileExistsError):
        os.mkfifo(f"meet-{number}")
    open(f"meet-{number}", "r" if rank % 2 else "w").close()

def serve():
    meet()
    while True:
        signal.pause()

def fail():
    meet()
    raise ValueError("rank %d is broken" % rank)

def end(code):
    meet()
    sys.exit(code)

def lose_peer():
    open("go").read()
    print("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:12345")
    sys.exit(69)

def fail_late():
    open("late").read()
    raise ValueError("the cause")

signal.signal(signal.SIGTERM, save)
"""
"""Each test adds the actions of its workers."""


def assignment_of(number: int, num_workers: int) -> Assignment:
    parts = (
        RoundHost("host-1", "s1", "10.0.0.1", 0, num_workers),
        RoundHost("host-2", "s2", "10.0.0.2", num_workers, num_workers),
    )
    a_round = Round(number, 2 * num_workers, parts, "10.0.0.1", 4711, "a test", "host-1", 0.0)
    return Assignment(a_round, parts[1])


@dataclass
class Bench:
    """An agent in a thread, and its environment."""

    orders: ManualOrders
    recorder: ReportRecorder
    logs: WorkerLogs
    agent: RoundAgent
    directory: Path
    thread: threading.Thread

    def wait_up(self, number: int, *ranks: int) -> None:
        paths = [self.directory / f"up-{number}-{rank}" for rank in ranks]
        wait_until(lambda: all(path.exists() for path in paths), f"{paths}")


@pytest.fixture(scope="module")
def standby() -> Iterator[StandbyClient]:
    with StandbyClient(preload=()) as client:
        yield client


@contextmanager
def running_agent(standby: StandbyClient, directory: Path, behavior: str, grace_s: float = 20.0) -> Iterator[Bench]:
    """Run an agent of host-2 whose workers (ranks 2 and 3 of a round with two workers a host) do `behavior`."""
    module = f"agent_program_{directory.name}"
    (directory / f"{module}.py").write_text(PROGRAM + behavior)
    orders, recorder = ManualOrders(), ReportRecorder()
    with WorkerLogs(directory / "logs", tee="none") as logs:
        settings = AgentSettings("job-1", module, (), dict(os.environ), directory, grace_s)
        agent = RoundAgent(settings, orders, recorder, standby, logs)
        thread = threading.Thread(target=agent.run)
        thread.start()
        try:
            yield Bench(orders, recorder, logs, agent, directory, thread)
        finally:
            orders.leave()
            agent.wake()
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
            wait_until_gone(*recorder.pids)


def test_done_round_is_reported_and_the_agent_waits_for_the_next(standby: StandbyClient, tmp_path: Path) -> None:
    with running_agent(standby, tmp_path, "end(0)") as bench:
        bench.orders.give(assignment_of(1, 2))
        bench.recorder.wait_for("stopped")
        assert bench.recorder.kinds == ["started", "ended", "ended", "stopping", "stopped"]
        assert sorted((end.rank, end.local_rank, end.exit_code, end.log_verdict) for end in bench.recorder.ends) == [
            (2, 0, 0, None),
            (3, 1, 0, None),
        ]
        bench.orders.give(assignment_of(2, 2))
        bench.recorder.wait_for("stopped", 2)
        bench.orders.leave()
        bench.thread.join(DEADLINE_S)
        assert not bench.thread.is_alive()


@pytest.fixture
def _no_wait_for_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that waits for the cause of a failure waits longer than any test."""
    monkeypatch.setattr("megatrain_launcher.agent.CAUSE_TIMEOUT_S", 3600.0)


@pytest.mark.usefixtures("_no_wait_for_a_cause")
def test_exception_is_reported_with_its_cause(standby: StandbyClient, tmp_path: Path) -> None:
    with running_agent(standby, tmp_path, "fail() if rank == 3 and number == 1 else serve()") as bench:
        bench.orders.give(assignment_of(1, 2))
        bench.recorder.wait_for("stopped")
        (end,) = bench.recorder.ends
        assert (end.rank, end.exit_code) == (3, 1)
        assert end.log_verdict is not None
        assert end.log_verdict.label is Label.USER_CODE
        assert end.line == "ValueError: rank 3 is broken"
        assert bench.recorder.kinds == ["started", "ended", "stopping", "stopped"]
        wait_until_gone(*bench.recorder.pids)
        log = rank_log_path(tmp_path / "logs", 1, 3)
        assert log.read_text().endswith("ValueError: rank 3 is broken\n")
        bench.orders.give(assignment_of(2, 2))
        bench.wait_up(2, 2, 3)


@pytest.mark.usefixtures("_no_wait_for_a_cause")
@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
        ("ctypes.string_at(0)", -signal.SIGSEGV),
    ],
)
def test_signal_is_reported_at_once(standby: StandbyClient, tmp_path: Path, fault: str, exit_code: int) -> None:
    behavior = f"(meet(), {fault}) if rank == 2 else serve()"
    began_s = time.time()
    with running_agent(standby, tmp_path, behavior) as bench:
        bench.orders.give(assignment_of(1, 2))
        bench.recorder.wait_for("stopped")
        (end,) = bench.recorder.ends
        assert (end.rank, end.exit_code) == (2, exit_code)
        assert began_s <= end.at_unix_s <= time.time()


def test_consequence_waits_for_its_cause_on_this_host(standby: StandbyClient, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    os.mkfifo(tmp_path / "late")
    with running_agent(standby, tmp_path, "lose_peer() if rank == 2 else fail_late()") as bench:
        bench.orders.give(assignment_of(1, 2))
        bench.recorder.wait_for("started")
        (tmp_path / "go").write_text("")
        bench.recorder.wait_for("ended")
        (tmp_path / "late").write_text("")
        bench.recorder.wait_for("stopped")
        first, second = bench.recorder.ends
        assert first.rank == 2
        assert first.log_verdict is not None
        assert first.log_verdict.is_cascade
        assert second.line == "ValueError: the cause"


def test_consequence_alone_ends_the_round(standby: StandbyClient, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    with running_agent(standby, tmp_path, "lose_peer() if rank == 2 else serve()") as bench:
        bench.orders.give(assignment_of(1, 2))
        bench.wait_up(1, 3)
        (tmp_path / "go").write_text("")
        bench.recorder.wait_for("stopped")
        assert [end.rank for end in bench.recorder.ends] == [2]


def test_halt_kills_stopped_workers_and_ones_that_ignore_signals(standby: StandbyClient, tmp_path: Path) -> None:
    behavior = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"])
Path(f"up-{number}-{rank}").touch()
os.kill(os.getpid(), signal.SIGSTOP) if rank == 2 else ctypes.PyDLL(None).pause()
"""
    with running_agent(standby, tmp_path, behavior) as bench:
        bench.orders.give(assignment_of(1, 2))
        bench.wait_up(1, 2, 3)
        bench.orders.halt(1)
        bench.recorder.wait_for("stopped")
        assert bench.recorder.kinds == ["started", "stopping", "stopped"]


def test_saving_halt_lets_workers_save(standby: StandbyClient, tmp_path: Path) -> None:
    with running_agent(standby, tmp_path, "serve()") as bench:
        bench.orders.give(assignment_of(1, 2))
        bench.wait_up(1, 2, 3)
        bench.orders.halt(1, is_saving=True)
        bench.agent.wake()
        bench.recorder.wait_for("stopped")
        assert [end.exit_code for end in bench.recorder.ends] == [75, 75]
        assert rank_log_path(tmp_path / "logs", 1, 2).read_text() == "saved\n"


def test_saving_halt_has_an_end(standby: StandbyClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_launcher.agent._GRACE_SLACK_S", 0.2)
    behavior = "rank == 2 and signal.signal(signal.SIGTERM, signal.SIG_IGN)\nserve()"
    with running_agent(standby, tmp_path, behavior, grace_s=0.1) as bench:
        bench.orders.give(assignment_of(1, 2))
        bench.wait_up(1, 2, 3)
        bench.orders.halt(1, is_saving=True)
        bench.recorder.wait_for("stopped")
        assert [(end.rank, end.exit_code) for end in bench.recorder.ends] == [(3, 75)]


def test_saving_halt_lasts_for_the_published_stop_time(
    standby: StandbyClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain_launcher.agent._GRACE_SLACK_S", 0.0)
    os.mkfifo(tmp_path / "go")
    behavior = """
def save_late(*_):
    Path("saving").touch()
    open("go").read()
    sys.exit(75)

rank == 2 and signal.signal(signal.SIGTERM, save_late)
serve()
"""
    with running_agent(standby, tmp_path, behavior, grace_s=0.0) as bench:
        bench.orders.deadlines[1] = RoundDeadlines(1, stop_s=20.0)
        bench.orders.give(assignment_of(1, 2))
        bench.wait_up(1, 2, 3)
        bench.orders.halt(1, is_saving=True)
        wait_until((tmp_path / "saving").exists, "the save")
        bench.recorder.wait_for("ended")  # the other worker, while this one exceeds the usual grace
        (tmp_path / "go").write_text("")
        bench.recorder.wait_for("stopped")
        assert sorted((end.rank, end.exit_code) for end in bench.recorder.ends) == [(2, 75), (3, 75)]


def test_dead_standby_server_breaks_one_round_only(standby: StandbyClient, tmp_path: Path) -> None:
    with running_agent(standby, tmp_path, "serve()") as bench:
        bench.orders.give(assignment_of(1, 2))
        bench.wait_up(1, 2, 3)
        assert standby.pid is not None
        os.kill(standby.pid, signal.SIGKILL)
        bench.recorder.wait_for("stopped")
        assert {end.exit_code for end in bench.recorder.ends} == {-signal.SIGKILL}
        note = "its standby server died, so all workers of the host were killed"
        assert {end.line for end in bench.recorder.ends} == {note}
        bench.orders.give(assignment_of(2, 2))
        bench.wait_up(2, 2, 3)


def test_halt_while_the_server_is_not_ready_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "endless_preload.py").write_text("import threading; threading.Event().wait()\n")
    with (
        StandbyClient(preload=("endless_preload",), directory=tmp_path) as standby,
        running_agent(standby, tmp_path, "serve()") as bench,
    ):
        bench.orders.give(assignment_of(1, 2))
        bench.orders.halt(1)
        bench.recorder.wait_for("stopped")
        assert bench.recorder.kinds == ["stopping", "stopped"]


def test_workers_that_cannot_be_started_are_a_failure(
    standby: StandbyClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with running_agent(standby, tmp_path, "serve()") as bench:
        monkeypatch.setattr(bench.logs, "open_rank", fail)
        bench.orders.give(assignment_of(1, 2))
        bench.recorder.wait_for("stopped")
        (end,) = bench.recorder.ends
        assert (end.pid, end.exit_code) == (0, 1)
        assert "Too many open files" in end.line


def test_environment_equals_the_one_that_the_trainer_reads() -> None:
    assignment = assignment_of(7, 2)
    environment = worker_environment({"PATH": "/bin", "RANK": "99"}, "job-1", assignment, 1)
    process = process_from_environment(environment)
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (3, 4, 1, 2)
    assert (process.round, process.store) == (7, "10.0.0.1:4711")
    assert environment["GROUP_RANK"] == "1"
    assert environment["MEGATRAIN_HOST"] == "host-2"
    assert environment["TORCHELASTIC_RUN_ID"] == "job-1"
    assert environment["PATH"] == "/bin"
    assert process.rollback is None
    # not one of the round in which this executor may have been started
    rollback = Rollback("i-1", 40, 41, 43)
    after = replace(assignment, round=replace(assignment.round, rollback=rollback))
    inherited = worker_environment({}, "job-1", after, 1)
    assert process_from_environment(inherited).rollback == rollback
    assert process_from_environment(worker_environment(inherited, "job-1", assignment, 1)).rollback is None


def test_several_workers_get_one_thread_each() -> None:
    assert server_environment({}, 2) == {"OMP_NUM_THREADS": "1"}
    assert server_environment({"OMP_NUM_THREADS": "3"}, 2) == {"OMP_NUM_THREADS": "3"}
    assert server_environment({}, 1) == {}
