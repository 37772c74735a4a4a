"""A job under `megatrain launch` on one machine: a real etcd, executors, a spare, and faults in their workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatrain.contracts.records.host_records import HostRecord, HostStatus
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import RecordType, decode
from megatrain.contracts.records.rounds import JobEnd, Round
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from tests.helpers.forked_launch import forked_launch
from tests.helpers.forked_program import ForkedProgram
from tests.helpers.namespaces import HostNetwork
from tests.helpers.source_tree import ROOT
from tests.helpers.step_faults import VARIABLE, FaultDirectory
from tests.helpers.tiny_data import write_corpus
from tests.helpers.train_process import TrainJob, make_job
from tests.helpers.waiting import DEADLINE_S, DeadlineError, wait_until

VOCAB_SIZE = 61
Launcher = subprocess.Popen[bytes] | ForkedProgram

WORKERS = 2
OVERLAPPED: Mapping[str, Mapping[str, Any]] = {"parallel": {"bucket_size": 3000, "overlap": True}}
"""Several buckets whose collectives run beside the computation: for jobs whose fault, or its check, needs them."""


def make_launched_job(root: Path, steps: int, *changes: Mapping[str, Mapping[str, Any]]) -> TrainJob:
    """Write a job of up to four data-parallel ranks on real token files; its snapshots are in `root`, and it saves a
    checkpoint every 10 steps.

    Two layers, one bucket and no overlap: a step is cheap, because other tests share the cores.
    """
    data = write_corpus(root / "data" / "train", 20_000, VOCAB_SIZE)
    tables: dict[str, dict[str, Any]] = {
        "job": {"name": root.name},
        "data": {"train": str(data)},
        "model": {"num_layers": 2},
        "parallel": {"bucket_size": 0, "overlap": False},
        "batch": {"global_batch_size": 4},
        "train": {"steps": steps},
        "checkpoint": {"interval": 10, "arena_directory": str(root / "job"), "keep_arena_s": 5.0},
        "runtime": {"save_grace_s": 10.0, "first_step_timeout_s": 60.0, "init_timeout_s": 60.0},
        "log": {"interval": 10},
        "recovery": {"has_health_checks": False},
    }
    return make_job(root / "job", tables, *changes)


@dataclass
class LaunchedJob:
    """Executors by host id. As a context manager it leaves no process behind."""

    job: TrainJob
    endpoints: Sequence[str]
    """The addresses of an etcd that all hosts reach; none: each launch starts its own, and has all hosts on this
    machine."""
    faults: FaultDirectory
    arguments: Sequence[str]
    """Arguments of `megatrain launch`, the same for all hosts."""
    module: str = "tests.helpers.step_faults"
    """The module that workers run; it takes the arguments of `megatrain train`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    has_daemon: bool = False
    """Whether its hosts run daemon and page."""
    is_forked: bool = False
    """Whether launchers are forks that need not import torch, unless they run elsewhere."""
    executors: dict[str, Launcher] = field(default_factory=dict)
    _forks: ExitStack = field(default_factory=ExitStack)

    def start(self, host: str, *more: str, enter: Sequence[str] = ()) -> Launcher:
        """Start the executor of a host, or a launch of all; `enter`: the start of a command line that runs
        elsewhere."""
        alone = ("--standalone",)
        place = ("--rdzv-endpoint", ",".join(self.endpoints), "--host-id", host) if self.endpoints else alone
        arguments = [
            *place, *([] if self.has_daemon else ["--no-daemon"]), *self.arguments, *more,
            "-m", self.module, str(self.job.config_file),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.faults.environment, **self.environment}
        with (self.job.root / f"{host}.log").open("ab") as log:
            process: Launcher
            if self.is_forked and not enter:
                process = self._forks.enter_context(forked_launch(arguments, environment, log))
            else:
                process = subprocess.Popen(
                    [*enter, sys.executable, "-m", "megatrain", "launch", *arguments],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        self.executors[host] = process
        return process

    def log(self, host: str) -> str:
        return (self.job.root / f"{host}.log").read_text(errors="replace")

    def finish(self, host: str) -> int:
        """Wait for an executor's end and return its exit code."""
        try:
            return self.executors[host].wait(2 * DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"{host} still runs after {2 * DEADLINE_S:g} s:\n{self.log(host)[-3000:]}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.executors.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._forks.close()

    def processes(self) -> list[int]:
        """Return every live process of this job: all of them have its fault directory in their environment."""
        wanted = f"{VARIABLE}={self.faults.root}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and wanted in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return sorted(found)

    def step_records(self) -> list[dict[str, Any]]:
        return self.job.records("step")

    def losses(self) -> dict[int, float]:
        """Return the loss of each step; the last one if a step was recorded repeatedly."""
        return {record["step"]: record["loss"] for record in self.step_records()}

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: any(each["step"] >= step for each in self.step_records()), f"step {step}", 3 * DEADLINE_S)


@dataclass(frozen=True, slots=True)
class LaunchedJobView:
    """The keys of a job in etcd, read again by each call."""

    client: EtcdClient
    keys: JobKeys

    @classmethod
    def of(cls, job: TrainJob, endpoints: Sequence[str]) -> Self:
        return cls(EtcdClient(EtcdSettings.of(list(endpoints))), JobKeys(job.config.job.name))

    def all(self, directory: str, kind: type[RecordType]) -> list[RecordType]:
        items = self.client.read_all(KeyRange.prefix(self.keys.directory(directory))).items
        return [decode(kind, item.value, item.key.decode()) for item in items]

    def hosts(self) -> dict[str, HostRecord]:
        return {record.host: record for record in self.all("hosts", HostRecord)}

    def statuses(self) -> dict[str, HostStatus]:
        return {status.host: status for status in self.all("status", HostStatus)}

    def rounds(self) -> list[Round]:
        return self.all("rounds", Round)

    def incidents(self) -> list[Incident]:
        return self.all("incidents", Incident)

    def end(self) -> JobEnd | None:
        item = self.client.get(self.keys.end)
        return None if item is None else decode(JobEnd, item.value, self.keys.end)

    def driver(self) -> str:
        """Return the host that drives, "" if none does."""
        items = self.client.read_all(KeyRange.prefix(self.keys.election + "/")).items
        if not items:
            return ""
        value = min(items, key=lambda item: item.create_revision).value.decode()
        with suppress(ValueError):
            found = json.loads(value)
            if isinstance(found, dict):
                return str(found.get("host", value))
        return value

    def wait_recovered(self, number: int) -> Incident:
        """Return incident number `number`, counted from 0, when it is closed."""

        def is_over() -> bool:
            found = self.incidents()
            return len(found) > number and found[number].state is not IncidentState.OPEN

        wait_until(is_over, f"the end of incident {number}")
        return self.incidents()[number]


@dataclass
class ViewedJob:
    """A job under launch, and the view of its state."""

    launched: LaunchedJob
    view: LaunchedJobView

    def newest_step(self) -> int:
        return max((record["step"] for record in self.launched.step_records()), default=0)

    def wait_for_more_steps(self, count: int) -> int:
        """Wait until the job has come `count` steps further; return how far it is."""
        wanted = self.newest_step() + count
        self.launched.wait_for_step(wanted)
        return self.newest_step()

    def start_hosts(self, hosts: Sequence[str], num_training: int, network: HostNetwork | None, name: str) -> None:
        """Start the hosts, each in its namespace of the network `name`. The first `num_training` form a round before
        the others start.
        """
        for number, host in enumerate(hosts):
            address = "127.0.0.1" if network is None else network.address(name, number)
            enter = [] if network is None else network.enter(number)
            self.launched.start(host, "--local-addr", address, enter=enter)
            if number == num_training - 1:
                wait_until(lambda: len(self.view.rounds()) > 0, "the first round")
