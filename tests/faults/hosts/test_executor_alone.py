"""Executors and what befalls them: an etcd that is away while ranks hang, kill -9, launches that do not fit."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from megatrain.config.serialize import to_toml
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import RequestKind
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.jobs.send_request import make_request
from tests.helpers.etcd_proxy import LONG_LENGTH, Conduct, EtcdProxy, FirstWatches
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.executor_process import executor_process
from tests.helpers.job_under_launch import JobView, make_launched_job
from tests.helpers.processes import descendants, is_running
from tests.helpers.step_faults import FaultDirectory
from tests.helpers.train_process import Job
from tests.helpers.training_case import make_config
from tests.helpers.waiting import DEADLINE_S, wait_until

_numbers = itertools.count()
SHORT_LEASE = {"recovery": {"lease_ttl_s": 2, "lease_renew_s": 0.5, "hang_floor_s": 2.0}}


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServers]:
    (tmp_path / "etcd").mkdir()
    with EtcdServers(tmp_path / "etcd") as servers:
        yield servers


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultDirectory:
    """Faults for the workers of this test; every process of it has the directory in its environment."""
    directory = FaultDirectory(tmp_path / "faults", pace_s=0.05)
    for name, value in directory.environment.items():
        monkeypatch.setenv(name, value)
    return directory


StartExecutor = Callable[..., AbstractContextManager[Popen[bytes]]]


@pytest.fixture
def start(tmp_path: Path, etcd: EtcdServers) -> StartExecutor:
    """Start a host's executor; its output is appended to HOST.log."""

    def enter(job: Job, host: str, **more: Any) -> AbstractContextManager[Popen[bytes]]:
        arguments: dict[str, Any] = {
            "config": str(job.config_file), "endpoints": etcd.urls, "host": host, "num_workers": 2, "min_hosts": 1,
            "max_hosts": 1, "module": "tests.helpers.step_faults", "launch_id": "L",
        }  # fmt: skip
        file = tmp_path / f"{host}-{next(_numbers)}.json"
        return executor_process(file, tmp_path / f"{host}.log", **{**arguments, **more})

    return enter


def workers(process: Popen[bytes]) -> list[int]:
    """Return the processes of an executor's ranks."""
    found = []
    for pid in descendants(process.pid):
        try:
            if Path(f"/proc/{pid}/comm").read_text().startswith("mt-rank"):
                found.append(pid)
        except OSError:
            continue
    return found


def has_stepped(job: Job, step: int) -> Callable[[], bool]:
    return lambda: any(record["step"] >= step for record in job.records("step"))


@pytest.mark.slow
def test_host_without_etcd_trains_until_it_hangs(
    tmp_path: Path, etcd: EtcdServers, faults: FaultDirectory, start: StartExecutor
) -> None:
    job = make_launched_job(tmp_path / "fenced", 150, SHORT_LEASE, {"log": {"interval": 1}})
    faults.fail_at(1, 100, "stop")
    with start(job, "a") as executor:
        view = JobView.of(job, etcd.urls)
        wait_until(has_stepped(job, 5), "training")
        session = view.hosts()["a"].session
        etcd.members[0].kill()
        wait_until(has_stepped(job, 95), "steps beyond the lease's end")
        wait_until(lambda: faults.struck_unix_s() is not None, "the hang")
        wait_until(lambda: not workers(executor), "the host to stop its workers")
        assert "fenced itself" in (tmp_path / "a.log").read_text()
        etcd.members[0].start()
        etcd.wait_ready()
        assert executor.wait(DEADLINE_S) == 0
        assert [each.number for each in view.rounds()] == [1, 2], view.rounds()
        assert view.rounds()[1].hosts[0].session == session  # no host had gone on without it
    assert job.records("step")[-1]["step"] == 150
    assert job.boxes == []


@pytest.mark.slow
def test_hanging_workers_of_a_frozen_executor_end_themselves(
    tmp_path: Path, etcd: EtcdServers, faults: FaultDirectory, start: StartExecutor
) -> None:
    job = make_launched_job(tmp_path / "frozen", 60, SHORT_LEASE, {"log": {"interval": 1}})
    faults.fail_at(1, 20, "stop")
    with start(job, "a") as executor:
        wait_until(has_stepped(job, 5), "training")
        family = workers(executor)
        executor.send_signal(signal.SIGSTOP)
        wait_until(lambda: faults.struck_unix_s() is not None, "the hang")
        wait_until(lambda: not any(is_running(pid) for pid in family), "the workers to end themselves")
        executor.send_signal(signal.SIGCONT)
        assert executor.wait(DEADLINE_S) == 0
    logs = "".join(path.read_text() for path in job.files.logs.rglob("round-000001/*.log"))
    # the first to go may well be noticed by the other, which then ends in its own way
    assert "is ended by its watchdog: this host fenced itself: " in logs
    assert job.records("step")[-1]["step"] == 60
    assert job.boxes == []


def test_killed_executor_leaves_no_process(
    tmp_path: Path, etcd: EtcdServers, faults: FaultDirectory, start: StartExecutor
) -> None:
    job = make_launched_job(tmp_path / "killed", 60, SHORT_LEASE, {"log": {"interval": 1}})
    with start(job, "a") as executor:
        wait_until(has_stepped(job, 12), "training")
        family = workers(executor)
        assert len(family) >= 2
        executor.send_signal(signal.SIGKILL)
        executor.wait()
        wait_until(lambda: not any(is_running(pid) for pid in family), "its workers to die with it")
    assert job.boxes
    with start(job, "a") as executor:
        assert executor.wait(DEADLINE_S) == 0
    assert job.records("step")[-1]["step"] == 60
    assert job.boxes == []
    assert len(list((job.files.incidents / "round-000001").glob("*.blackbox"))) == 2


@pytest.mark.slow
def test_a_signal_has_the_job_saved_and_stopped(
    tmp_path: Path, etcd: EtcdServers, faults: FaultDirectory, start: StartExecutor
) -> None:
    job = make_launched_job(tmp_path / "stopped", 10_000, {"log": {"interval": 1}})
    with ExitStack() as stack:
        first, second = (stack.enter_context(start(job, host, min_hosts=2, max_hosts=2)) for host in ("a", "b"))
        wait_until(has_stepped(job, 5), "training")
        os.kill(second.pid, signal.SIGUSR1)
        assert (first.wait(DEADLINE_S), second.wait(DEADLINE_S)) == (ExitCode.SAVED_AND_STOPPED,) * 2
        view = JobView.of(job, etcd.urls)
        end = view.end()
        assert end is not None
        assert "SIGUSR1" in end.reason
        assert view.hosts() == {}  # the leases are given back, not left to run out


@pytest.mark.slow
def test_executor_reads_orders_although_its_watches_fail(
    tmp_path: Path, etcd: EtcdServers, faults: FaultDirectory, start: StartExecutor
) -> None:
    """Once each, while it trains. Then the job is stopped: only a host that receives the halt saves and ends."""
    job = make_launched_job(tmp_path / "deaf", 10_000, {"log": {"interval": 1}})
    keys = JobKeys(job.config.job.name)
    with EtcdProxy(etcd.members[0].client_port) as proxy, start(job, "a", endpoints=[proxy.url]) as executor:
        wait_until(has_stepped(job, 5), "training")
        first = FirstWatches(map(keys.directory, ("rounds", "halts", "commands")))
        proxy.garbage, proxy.spoils, proxy.conduct = [LONG_LENGTH], first, Conduct.GARBAGE
        proxy.cut()
        wait_until(lambda: not first.left, "each watch to be answered with garbage")
        request = make_request(RequestKind.STOP, reason="a test")
        with EtcdClient(EtcdSettings.of(etcd.urls)) as client:
            client.put(keys.request(request.request_id), encode(request))
        assert executor.wait(DEADLINE_S) == request.exit_code
    end = JobView.of(job, etcd.urls).end()
    assert end is not None
    assert "a test" in end.reason


@pytest.mark.slow
def test_launches_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, etcd: EtcdServers, faults: FaultDirectory, start: StartExecutor
) -> None:
    job = make_launched_job(tmp_path / "mine", 10_000, {"log": {"interval": 1}})
    changed = tmp_path / "changed.toml"
    changed.write_text(to_toml(make_config(job.config.to_dict(), {"train": {"seed": 99}})))
    with start(job, "a", max_hosts=2):
        wait_until(has_stepped(job, 1), "training")
        for host, more, words in (
            ("a", {}, "has a live executor of this name"),
            ("b", {"config": str(changed)}, "train.seed: b has 99, but a, the first host of job 'mine', has 7"),
            ("c", {"launch_id": "another"}, "another launch of this name is running (begun by a"),
        ):
            with start(job, host, max_hosts=2, **more) as refused:
                assert refused.wait(DEADLINE_S) == ExitCode.CONFIG
            assert words in (tmp_path / f"{host}.log").read_text()
        before = job.records("step")[-1]["step"]
        wait_until(has_stepped(job, before + 5), "the job to go on undisturbed")
