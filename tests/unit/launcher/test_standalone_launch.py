"""A job on one machine by one command, with stand-ins for executors: its etcd, its files, signals, and no leftovers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.own_files import make_own_directory
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.programs.stop_signals import StopSignals, record_only
from megatrain.run_files.run_directory import RunDirectory, black_box_path
from megatrain_job.commands.etcd_flags import etcd_arguments
from megatrain_job.coordination.client import EtcdClient
from megatrain_launcher.commands.launch import StoppedEarly, stop_early
from megatrain_launcher.executor import job_programs
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.hosts.local import LocalHosts
from megatrain_launcher.launch.host import run_launch
from megatrain_launcher.launch.plan import LaunchPlan, make_plan
from tests.helpers.arena_snapshots import host_plan, make_arena
from tests.helpers.etcd_server import etcd_program
from tests.helpers.launch_cases import small_flags
from tests.helpers.processes import is_running
from tests.helpers.waiting import wait_until

EXECUTOR = """
import signal, sys
from pathlib import Path
directory, code = Path(sys.argv[1]), int(sys.argv[2])
host = next(word.partition("=")[2] for word in sys.argv if word.startswith("--host-id="))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
(directory / f"{host}.started").write_text(" ".join(sys.argv[3:]))
if code >= 0:
    signal.pause()
"""
"""A program in place of `megatrain`: reports that it runs, and ends with its own exit code on request."""


@pytest.fixture(autouse=True)
def needs_etcd() -> None:
    etcd_program()


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    return make_plan(small_flags(tmp_path), {})


def test_single_host_runs_its_executor_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "arenas").mkdir()
    plan = make_plan(small_flags(tmp_path, overrides=(f"--checkpoint.arena_directory={tmp_path / 'arenas'}",)), {})
    snapshots = replace(host_plan(str(plan.files.run / "checkpoints")), job="small")
    arena = make_arena(tmp_path / "arenas" / "megatrain-arena1.small.h1", snapshots).root
    seen: dict[str, Any] = {}
    box = black_box_path(
        Path(plan.config.telemetry.black_box_directory), "small", RunDirectory(plan.files.run).key, "main", 3, 0
    )
    foreign = box.with_name(box.name.replace(RunDirectory(plan.files.run).key, "00000000"))

    def execute(settings: ExecutorSettings) -> int:
        seen["endpoint"] = json.loads(plan.files.endpoint.read_text())
        seen["settings"] = settings
        make_own_directory(box.parent)
        box.touch()
        foreign.touch()
        with EtcdClient(settings.etcd) as client:
            client.put("key", "value")
        return 75

    reported: list[str] = []
    environment = {"MEGATRAIN_ETCD_PASSWORD": "secret", "OTHER": "1"}
    assert run_launch(plan, environment, execute, reported.append) == 75

    settings = seen["settings"]
    assert dict(settings.environment) == {"OTHER": "1"}, "workers get no password of another etcd"
    assert seen["endpoint"] == {
        "endpoints": [str(settings.etcd.endpoints[0])], "job": "small", "launch_id": settings.launch_id,
        "user": "megatrain",
    }  # fmt: skip
    assert settings.address == "127.0.0.1"
    assert len(settings.launch_id) == 16
    assert not plan.files.endpoint.exists()
    assert not box.exists()
    assert foreign.exists()
    assert not arena.exists()
    assert reported == []


@pytest.mark.slow
def test_hosts_of_a_killed_launch_do_not_block_the_next(plan: LaunchPlan) -> None:
    keys = JobKeys("small")
    left = [keys.host("h1"), keys.status("h1"), f"{keys.election}/1"]

    def register(settings: ExecutorSettings) -> int:
        with EtcdClient(settings.etcd) as client:
            for key in (*left, keys.round(1)):
                client.put(key, "from before")
        return 137

    def check(settings: ExecutorSettings) -> int:
        with EtcdClient(settings.etcd) as client:
            assert [client.get(key) for key in left] == [None, None, None]
            assert client.get(keys.round(1)) is not None
        return 0

    assert run_launch(plan, {}, register, lambda _: None) == 137
    assert run_launch(plan, {}, check, lambda _: None) == 0


@pytest.mark.slow
def test_end_of_the_executor_ends_etcd_and_the_daemon(plan: LaunchPlan) -> None:
    pids: list[int] = []
    others = children()

    def execute(settings: ExecutorSettings) -> int:
        pids.extend(int(line) for line in children() if line not in others)
        with pytest.raises(ConfigError, match="has launched a job there that still runs"):
            run_launch(plan, {}, lambda _: 0, lambda _: None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_launch(plan, {}, execute, lambda _: None)
    assert pids
    assert not any(map(is_running, pids))
    assert not plan.files.endpoint.exists()


def children() -> list[str]:
    found = []
    for thread in Path("/proc/self/task").iterdir():
        found += (thread / "children").read_text().split()
    return found


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[LocalHosts]:
    with make_hosts(tmp_path, code=75) as running:
        wait_for(tmp_path, 3)
        yield running


def make_hosts(directory: Path, code: int, reported: list[str] | None = None) -> LocalHosts:
    program = [sys.executable, "-S", "-c", EXECUTOR, str(directory), str(code)]
    return LocalHosts(["CONFIG"], 3, {}, [].append if reported is None else reported.append, program)


def wait_for(directory: Path, count: int) -> None:
    wait_until(lambda: len(list(directory.glob("host-*.started"))) == count, "all hosts to start")


def test_hosts_are_asked_to_stop_by_the_first_signal(tmp_path: Path, hosts: LocalHosts) -> None:
    asked: list[str] = []

    def ask(name: str) -> None:
        asked.append(name)
        hosts.stop()

    with StopSignals(ask):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert hosts.wait() == [75, 75, 75]
    assert asked == ["SIGUSR1"]
    assert (tmp_path / "host-2.started").read_text() == "launch --host-id=host-2 CONFIG"


def test_signal_before_the_job_ends_the_preparations_in_order() -> None:
    cases: list[tuple[signal.Signals, type[BaseException]]] = [
        (signal.SIGTERM, StoppedEarly), (signal.SIGUSR1, StoppedEarly), (signal.SIGINT, KeyboardInterrupt),
    ]  # fmt: skip
    for number, raised in cases:
        closed: list[str] = []
        before = signal.getsignal(number)
        with pytest.raises(raised), StopSignals(stop_early) as early, ExitStack() as stack:
            stack.callback(closed.append, "etcd")
            os.kill(os.getpid(), number)
            pytest.fail(f"{number.name} was not taken")
        assert (closed, early.name, signal.getsignal(number)) == (["etcd"], number.name, before)


def test_signal_after_the_job_changes_nothing() -> None:
    with StopSignals(stop_early) as early:
        early.set_callbacks(record_only)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert early.name == "SIGTERM", "recorded, and nothing raised"


@pytest.mark.slow(kept=["sys.exit(65)-65"])
@pytest.mark.parametrize(("program", "code"), [("signal.pause()", 75), ("sys.exit(65)", 65)])
def test_hosts_stopped_before_listening_count_as_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, code: int
) -> None:
    """A host that failed before the job was asked to stop has not stopped."""
    plan = make_plan(small_flags(tmp_path, is_standalone=True, min_hosts=2, max_hosts=2), {})

    class Hosts(LocalHosts):
        def __init__(self, arguments: Sequence[str], count: int, environment: Any, tell: Any) -> None:
            command = [sys.executable, "-S", "-c", f"import signal, sys; {program}"]
            super().__init__(arguments, count, environment, tell, command)

        def wait(self) -> list[int]:
            failed = super().wait() if code == 65 else []
            os.kill(os.getpid(), signal.SIGTERM)
            return failed or super().wait()

    monkeypatch.setattr("megatrain_launcher.launch.standalone.LocalHosts", Hosts)
    assert run_launch(plan, {}, lambda _: 1, lambda _: None) == code


def test_the_second_interrupt_leaves_no_host(tmp_path: Path) -> None:
    asked: list[str] = []
    running = make_hosts(tmp_path, 75)
    with pytest.raises(KeyboardInterrupt), StopSignals(asked.append), running:
        wait_for(tmp_path, 3)
        pids = list(running.pids.values())
        os.kill(os.getpid(), signal.SIGINT)
        assert asked == ["SIGINT"]
        os.kill(os.getpid(), signal.SIGINT)
        running.wait()
    assert not any(is_running(pid) for pid in pids)


def test_a_lost_host_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    reported: list[str] = []
    with make_hosts(tmp_path, 0, reported) as running:
        wait_for(tmp_path, 3)
        os.kill(running.pids["host-2"], signal.SIGKILL)
        wait_until(lambda: not is_running(running_pid(running)), "the kill")
        running.stop()
        assert sorted(running.wait()) == [-9, 0, 0]
    assert reported == ["host-2: its executor was killed by SIGKILL (9)"]


def running_pid(hosts: LocalHosts) -> int:
    return hosts.pids.get("host-2", 0)


def test_hosts_die_with_the_launch(tmp_path: Path) -> None:
    """kill -9 of the launch leaves nothing."""
    source = (
        "import sys\n"
        "from megatrain_launcher.hosts.local import LocalHosts\n"
        "with LocalHosts([], 2, {}, print, sys.argv[1:]) as hosts:\n"
        "    print(*hosts.pids.values(), flush=True)\n"
        "    hosts.wait()\n"
    )
    arguments = [sys.executable, "-c", source, sys.executable, "-S", "-c", EXECUTOR, str(tmp_path), "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as launch:
        assert launch.stdout is not None
        pids = [int(word) for word in launch.stdout.readline().split()]
        assert len(pids) == 2
        launch.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the executors to die")


def test_several_hosts_get_the_address_of_the_jobs_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(small_flags(tmp_path, is_standalone=True, min_hosts=2, max_hosts=2, spares=1), {})
    started: list[Sequence[str]] = []

    class Hosts(LocalHosts):
        def __init__(self, arguments: Sequence[str], count: int, environment: Any, tell: Any) -> None:
            started.append(arguments)
            super().__init__(arguments, count, environment, tell, [sys.executable, "-S", "-c", "raise SystemExit(68)"])

    monkeypatch.setattr("megatrain_launcher.launch.standalone.LocalHosts", Hosts)
    assert run_launch(plan, {}, lambda _: 1, lambda _: None) == 68
    (arguments,) = started
    password = f"--etcd-password-file={plan.files.password}"
    assert arguments[0].startswith("--rdzv-endpoint=unix:/")
    assert list(arguments[1:3]) == ["--etcd-user=megatrain", password]
    assert arguments[-1] == str(tmp_path / "small.toml")
    assert {"--nnodes=2:2", "--spares=1", "--nproc-per-node=1", "--platform=local"} < set(arguments)


@pytest.mark.slow
def test_an_installed_daemon_runs_beside_the_job(
    tmp_path: Path, plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entry:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> Any:
            if self.name == "broken":
                raise ImportError("no duckdb")
            source = "import signal, sys; open(sys.argv[1], 'w').write(' '.join(sys.argv[2:])); signal.pause()"
            arguments = [sys.executable, "-S", "-c", source]
            return lambda config, run, etcd: {self.name: [*arguments, run / "reported", *etcd, config.job.name]}

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry("broken"), Entry("diagnostics")])
    assert job_programs.ENTRY_POINT_GROUP == "megatrain.job_programs"
    seen: list[Any] = []

    def execute(settings: ExecutorSettings) -> int:
        daemon_file = plan.files.run / "reported"
        wait_until(lambda: daemon_file.exists() and bool(daemon_file.read_text()), "the daemon")
        seen.extend([daemon_file.read_text(), " ".join([*etcd_arguments(settings.etcd), "small"]), children()])
        return 0

    reported: list[str] = []
    others = children()
    assert run_launch(plan, {}, execute, reported.append) == 0
    assert seen[0] == seen[1]
    ours = set(seen[2]) - set(others)
    assert len(ours) == 2
    assert not any(is_running(int(pid)) for pid in ours)
    assert reported == ["broken cannot be started: ImportError: no duckdb; the job runs without it"]
