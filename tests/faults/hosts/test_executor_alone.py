"""Executors and faults around them: an etcd outage while ranks hang, kill -9, launches that do not match the job."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.serialize import to_toml
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.job_keys import JobKeys
from tests.helpers.etcd_proxy import LONG_LENGTH, Conduct, EtcdProxy, FirstWatches
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.executor_process import executor_process
from tests.helpers.forked_program import ForkedProgram
from tests.helpers.job_under_launch import LaunchedJobView, make_launched_job
from tests.helpers.processes import descendants, is_running
from tests.helpers.step_faults import FaultDirectory
from tests.helpers.train_process import TrainJob
from tests.helpers.training_case import make_config
from tests.helpers.waiting import DEADLINE_S, wait_until

_numbers = itertools.count()
QUIET: dict[str, dict[str, Any]] = {
    "log": {"interval": 1}, "diagnostics": {"is_streamed": False}, "dashboard": {"is_served": False},
}  # fmt: skip
SHORT_LEASE = {"recovery": {"lease_ttl_s": 2, "lease_renew_s": 0.5, "hang_floor_s": 2.0}}


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServers]:
    (tmp_path / "etcd").mkdir()
    with EtcdServers(tmp_path / "etcd") as servers:
        yield servers


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultDirectory:
    """Faults for the workers of this test; every process of the test has the directory in its environment."""
    directory = FaultDirectory(tmp_path / "faults", pace_s=0.2)
    for name, value in directory.environment.items():
        monkeypatch.setenv(name, value)
    return directory


StartExecutor = Callable[..., AbstractContextManager[ForkedProgram]]


@pytest.fixture
def start(tmp_path: Path, etcd: EtcdServers) -> StartExecutor:
    """Start a host's executor; its output is appended to HOST.log."""

    def enter(job: TrainJob, host: str, **more: Any) -> AbstractContextManager[ForkedProgram]:
        arguments: dict[str, Any] = {
            "config": str(job.config_file), "endpoints": etcd.urls, "host": host, "num_workers": 2, "min_hosts": 1,
            "max_hosts": 1, "module": "tests.helpers.step_faults", "launch_id": "L",
        }  # fmt: skip
        file = tmp_path / f"{host}-{next(_numbers)}.json"
        return executor_process(file, tmp_path / f"{host}.log", **{**arguments, **more})

    return enter


def workers(process: ForkedProgram) -> list[int]:
    """Return the processes of an executor's ranks."""
    found = []
    for pid in descendants(process.pid):
        try:
            if Path(f"/proc/{pid}/comm").read_text().startswith("mt-rank"):
                found.append(pid)
        except OSError:
            continue
    return found


def has_stepped(job: TrainJob, step: int) -> Callable[[], bool]:
    return lambda: any(record["step"] >= step for record in job.records("step"))


@pytest.mark.slow
def test_host_without_etcd_trains_until_it_hangs(
    tmp_path: Path, etcd: EtcdServers, faults: FaultDirectory, start: StartExecutor
) -> None:
    job = make_launched_job(tmp_path / "fenced", 45, SHORT_LEASE, QUIET)
    faults.fail_at(1, 30, "stop")
    with start(job, "a") as executor:
        view = LaunchedJobView.of(job, etcd.urls)
        wait_until(has_stepped(job, 5), "training")
        session = view.hosts()["a"].session
        etcd.members[0].kill()
        wait_until(has_stepped(job, 28), "steps beyond the lease's end")
        wait_until(lambda: faults.struck_unix_s() is not None, "the hang")
        wait_until(lambda: not workers(executor), "the host to stop its workers")
        assert "fenced itself" in (tmp_path / "a.log").read_text()
        etcd.members[0].start()
        etcd.wait_ready()
        assert executor.wait(DEADLINE_S) == 0
        assert [each.number for each in view.rounds()] == [1, 2], view.rounds()
        assert view.rounds()[1].hosts[0].session == session  # No host had continued without it.
    assert job.records("step")[-1]["step"] == 45
    assert job.boxes == []


@pytest.mark.slow
def test_hanging_workers_of_a_frozen_executor_end_themselves(
    tmp_path: Path, etcd: EtcdServers, faults: FaultDirectory, start: StartExecutor
) -> None:
    job = make_launched_job(tmp_path / "frozen", 30, SHORT_LEASE, QUIET)
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
    # The other host may notice the first exit, and then ends in its own way.
    assert "is ended by its watchdog: this host fenced itself: " in logs
    assert job.records("step")[-1]["step"] == 30
    assert job.boxes == []


def test_killed_executor_leaves_no_process(
    tmp_path: Path, etcd: EtcdServers, faults: FaultDirectory, start: StartExecutor
) -> None:
    job = make_launched_job(tmp_path / "killed", 30, SHORT_LEASE, QUIET)
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
    assert job.records("step")[-1]["step"] == 30
    assert job.boxes == []
    assert len(list((job.files.incidents / "round-000001").glob("*.blackbox"))) == 2


@pytest.mark.slow
def test_hosts_that_train_refuse_others_and_obey_orders(
    tmp_path: Path, etcd: EtcdServers, faults: FaultDirectory, start: StartExecutor
) -> None:
    """One job: others try to join it, the watches of a host fail, and the other host has it saved and stopped."""
    job = make_launched_job(tmp_path / "mine", 10_000, QUIET)
    both = {"min_hosts": 2, "max_hosts": 2}
    with EtcdProxy(etcd.members[0].client_port) as proxy, ExitStack() as stack:
        view = LaunchedJobView.of(job, etcd.urls)
        first = stack.enter_context(start(job, "a", endpoints=[proxy.url], **both))
        wait_until(lambda: "a" in view.hosts(), "the first host")
        second = stack.enter_context(start(job, "b", **both))
        wait_until(has_stepped(job, 1), "training")
        check_refusals(job, tmp_path, start, both)
        fail_each_watch_once(job, proxy)
        # Only a host that receives the halt saves and ends, and the other host writes the halt.
        os.kill(second.pid, signal.SIGUSR1)
        assert (first.wait(DEADLINE_S), second.wait(DEADLINE_S)) == (ExitCode.SAVED_AND_STOPPED,) * 2
        end = view.end()
        assert end is not None
        assert "SIGUSR1" in end.reason
        assert view.hosts() == {}  # The leases are revoked, and do not run out.


def check_refusals(job: TrainJob, root: Path, start: StartExecutor, more: dict[str, int]) -> None:
    """Check that launches that do not match are refused with a reason, and the job trains on."""
    changed = root / "changed.toml"
    changed.write_text(to_toml(make_config(job.config.to_dict(), {"train": {"seed": 99}})))
    for host, own, words in (
        ("a", {}, "has a live executor of this name"),
        ("c", {"config": str(changed)}, "train.seed: c has 99, but a, the first host of job 'mine', has 7"),
        ("d", {"launch_id": "another"}, "another launch of this name is running (begun by a"),
    ):
        with start(job, host, **more, **own) as refused:
            assert refused.wait(DEADLINE_S) == ExitCode.CONFIG
        assert words in (root / f"{host}.log").read_text()
    wait_until(has_stepped(job, job.records("step")[-1]["step"] + 2), "the job to continue undisturbed")


def fail_each_watch_once(job: TrainJob, proxy: EtcdProxy) -> None:
    first = FirstWatches(map(JobKeys(job.config.job.name).directory, ("rounds", "halts", "commands")))
    proxy.garbage, proxy.corrupts, proxy.conduct = [LONG_LENGTH], first, Conduct.GARBAGE
    proxy.cut()
    wait_until(lambda: not first.left, "each watch to be answered with garbage")
