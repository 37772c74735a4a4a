"""The host that runs the programs of a job: the elected driver's host starts them, and only the election of another one
ends them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import JobEnd, JobRecord
from megatrain.programs.supervisor import Supervisor
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.executor import program_runner
from megatrain_launcher.executor.job_programs import ProgramSettings
from megatrain_launcher.executor.program_runner import (
    ProgramRunner,
    ProgramRunnerParts,
    leave_mark,
    start_program_runner,
    why_not_shared,
)
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launched_job import make_record
from tests.helpers.single_rank import make_config
from tests.helpers.waiting import DEADLINE_S, wait_until

_numbers = itertools.count()


@dataclass
class RunnerPrograms:
    """The programs of a program runner."""

    begun: int = 0
    is_running: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def __call__(self) -> Iterator[dict[str, Supervisor]]:
        self.begun += 1
        self.is_running.set()
        try:
            yield {}
        finally:
            self.is_running.clear()


class AskedEvent(threading.Event):
    """Counts its queries: the runner queries it once in each of its polls."""

    num_asked = 0

    def is_set(self) -> bool:
        self.num_asked += 1
        return super().is_set()


class AskedClient(EtcdClient):
    """Counts how often a range was read: a closing runner reads the hosts until the others have left."""

    num_reads = 0

    def read_all(self, *arguments: Any, **options: Any) -> Any:
        found = super().read_all(*arguments, **options)
        self.num_reads += 1
        return found


@dataclass
class Kept:
    """A program runner, and the values that a test changes."""

    client: EtcdClient
    keys: JobKeys
    leading: AskedEvent
    programs: RunnerPrograms
    runner: ProgramRunner

    def elect(self, host: str) -> None:
        lease = self.client.grant_lease(60).lease_id
        self.client.delete(KeyRange.prefix(f"{self.keys.election}/"))
        self.client.put(f"{self.keys.election}/{lease:x}", host, lease_id=lease)

    def await_poll(self) -> None:
        """Return when the runner has polled once more, and has acted on the result."""
        before = self.leading.num_asked
        wait_until(lambda: self.leading.num_asked >= before + 2, "two polls")


@contextmanager
def keeping(client: EtcdClient, runner_client: EtcdClient | None = None) -> Iterator[Kept]:
    """Run a program runner during the block. runner_client: its client, if it differs from that of the test."""
    keys, leading, programs = JobKeys(f"kept-{next(_numbers)}"), AskedEvent(), RunnerPrograms()
    runner = ProgramRunner(ProgramRunnerParts(runner_client or client, keys, "host-0", leading, programs))
    try:
        yield Kept(client, keys, leading, programs, runner)
    finally:
        runner.close()
        assert not programs.is_running.is_set()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_runner, "_POLL_S", 0.01)
    monkeypatch.setattr(program_runner, "_TRY_S", 0.01)


def test_programs_run_on_the_drivers_host(client: EtcdClient) -> None:
    with keeping(client) as kept:
        assert kept.programs.begun == 0
        kept.elect("host-0")
        kept.leading.set()
        assert kept.programs.is_running.wait(DEADLINE_S)
        kept.leading.clear()
        client.delete(KeyRange.prefix(f"{kept.keys.election}/"))
        kept.await_poll()
        assert kept.programs.is_running.is_set(), "there is no leader, so no other host runs them"
        kept.elect("host-1")
        wait_until(lambda: not kept.programs.is_running.is_set(), "the end")
        kept.elect("host-0")
        kept.leading.set()
        assert kept.programs.is_running.wait(DEADLINE_S)
        assert kept.programs.begun == 2


def test_outage_of_etcd_ends_no_program(tmp_path: Path) -> None:
    with EtcdServers(tmp_path, 1) as servers:
        settings = EtcdSettings.of(servers.urls)
        # Its calls have short time limits: information that arrives later has no effect.
        impatient = replace(settings, attempt_s=0.2, call_s=0.2)
        with EtcdClient(settings) as client, EtcdClient(impatient) as other, keeping(client, other) as kept:
            kept.elect("host-0")
            kept.leading.set()
            assert kept.programs.is_running.wait(DEADLINE_S)
            servers.members[0].kill()
            kept.leading.clear()
            kept.await_poll()
            kept.await_poll()
            assert kept.programs.is_running.is_set()


def test_programs_of_a_finished_job_do_not_start(client: EtcdClient, etcd: EtcdServers) -> None:
    with AskedClient(EtcdSettings.of(etcd.urls)) as asked, keeping(client, asked) as kept:
        client.put(kept.keys.end, encode(JobEnd(0, "done", 1.0)))
        kept.leading.set()
        kept.await_poll()
        assert kept.programs.begun == 0
        client.delete(KeyRange.key(kept.keys.end))
        assert kept.programs.is_running.wait(DEADLINE_S)
        for host in ("host-0", "host-1"):
            client.put(kept.keys.host(host), "{}")
        client.put(kept.keys.end, encode(JobEnd(0, "done", 1.0)))
        closing = threading.Thread(target=kept.runner.close)
        closing.start()
        wait_until(lambda: asked.num_reads >= 2, "two reads of the hosts")
        assert kept.programs.is_running.is_set(), "another host's streamer has not sent everything"
        client.delete(KeyRange.key(kept.keys.host("host-1")))
        closing.join(DEADLINE_S)
        assert not kept.programs.is_running.is_set()


def test_daemon_host_runs_the_programs_whichever_host_drives(
    client: EtcdClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = RunnerPrograms()
    monkeypatch.setattr(program_runner, "running_programs", lambda settings, tell: programs())
    config = make_config(diagnostics={"daemon_host": "host-7"})
    settings = ProgramSettings(config, tmp_path, client.settings, {})
    record = make_record(job=f"kept-{next(_numbers)}", first_host="host-7")
    assert start_program_runner(settings, "host-0", client, record, threading.Event()) is None
    runner = start_program_runner(settings, "host-7", client, record, threading.Event())
    assert runner is not None
    assert programs.is_running.wait(DEADLINE_S)
    runner.close()
    assert not programs.is_running.is_set()


class TestSharedDirectory:
    RECORD: JobRecord = make_record(first_host="host-1", launch_id="l1")

    def why(self, run: Path, host: str) -> str:
        return why_not_shared(RunDirectory(run), self.RECORD, host, threading.Event())

    def test_the_directory_of_the_first_host_is_known_by_its_mark(self, tmp_path: Path) -> None:
        RunDirectory(tmp_path).create()
        leave_mark(RunDirectory(tmp_path), self.RECORD)
        assert self.why(tmp_path, "host-2") == ""

    def test_another_directory_is_reported(self, tmp_path: Path) -> None:
        RunDirectory(tmp_path).create()
        assert self.why(tmp_path, "host-1") == ""
        assert f"{tmp_path} on host-2 is not that of host-1" in self.why(tmp_path, "host-2")
        leave_mark(RunDirectory(tmp_path), make_record(launch_id="of before"))
        assert "set job.run_directory to storage that all hosts share" in self.why(tmp_path, "host-2")
