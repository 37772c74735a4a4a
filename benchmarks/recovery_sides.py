"""The two launchers that `recovery` compares: megatrain's, and stock torchrun on the same training job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatrain.contracts.records.incident import IncidentState, phase_seconds
from megatrain.run_files.run_directory import own_box_paths
from megatrain_launcher.etcd.server import free_port
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.job_under_launch import LaunchedJob, LaunchedJobView, make_launched_job
from tests.helpers.processes import descendants
from tests.helpers.source_tree import ROOT
from tests.helpers.step_faults import FaultDirectory
from tests.helpers.train_process import TrainJob
from tests.helpers.waiting import wait_until

STEPS = 60
PACE_S = 0.08
FAULT_STEP = 24
HOSTS = ("host-0", "host-1", "host-2")
SPARE = "host-2"
GIVE_UP_S = 90.0
GLOO_TIMEOUT_S = 10.0
"""The timeout of both sides. Stock torchrun detects a stopped rank only by it."""


@dataclass(frozen=True, slots=True)
class RecoveryOutcome:
    """The result of a run with a fault. Times are seconds since the fault; None: it did not happen."""

    detected_s: float | None
    next_step_s: float | None
    named: str
    losses: dict[int, float]
    num_orphans: int
    leaked: tuple[str, ...]
    phases: dict[str, float | None] = field(default_factory=dict)


class RecoverySide(Protocol):
    """A launcher with a training job under it."""

    job: TrainJob
    faults: FaultDirectory

    def kill_host(self, *, is_driver: bool) -> float:
        """Kill the launcher of a host without warning; return the unix time of it."""

    def outcome(self, struck_unix_s: float) -> RecoveryOutcome:
        """Wait until the job is over, and return its outcome."""


def make_job_at(root: Path) -> TrainJob:
    timeouts = {"step_timeout_s": GLOO_TIMEOUT_S, "save_grace_s": 5.0}
    return make_launched_job(root, STEPS, {"runtime": timeouts, "log": {"interval": 1000}})


def next_step_s(job: TrainJob, struck_unix_s: float) -> float | None:
    """Return the seconds from the fault to the first completed step after the restart; None: there was none."""
    last = 0
    for record in job.records("step"):
        if record["step"] <= last and record["unix_time_s"] > struck_unix_s:
            return float(record["unix_time_s"]) - struck_unix_s
        last = max(last, record["step"])
    return None


def memory_files(job: TrainJob) -> tuple[str, ...]:
    """Return the names of files that the job left in its memory directories."""
    boxes = [path.name for path in own_box_paths(job.root / "boxes")]
    arenas = [path.name for path in job.root.glob("megatrain-arena*")]
    return tuple(sorted(boxes + arenas))


@contextmanager
def ours(root: Path) -> Iterator[RecoverySide]:
    """Run two executors, a spare, and their own etcd."""
    job = make_job_at(root)
    faults = FaultDirectory(root / "faults", PACE_S)
    directory = root / "etcd"
    directory.mkdir()
    with EtcdServers(directory) as etcd, ExitStack() as stack:
        arguments = ("--nnodes", "2", "--spares", "1", "--nproc-per-node", "2", "--local-addr", "127.0.0.1")
        launched = stack.enter_context(LaunchedJob(job, etcd.urls, faults, arguments))
        view = LaunchedJobView.of(job, etcd.urls)
        stack.callback(view.client.close)
        for host in HOSTS[:2]:
            launched.start(host)
        wait_until(lambda: len(view.rounds()) > 0, "the first round")
        launched.start(SPARE)
        yield _Ours(job, faults, launched, view)


@dataclass
class _Ours:
    job: TrainJob
    faults: FaultDirectory
    launched: LaunchedJob
    view: LaunchedJobView

    def kill_host(self, *, is_driver: bool) -> float:
        driver = self.view.driver()
        hosts = HOSTS[:2]
        host = driver if is_driver else next(each for each in reversed(hosts) if each != driver)
        struck = time.time()
        self.launched.executors[host].kill()
        return struck

    def outcome(self, struck_unix_s: float) -> RecoveryOutcome:
        living = [host for host, each in self.launched.executors.items() if each.poll() is None]
        for host in living:
            self.launched.finish(host)
        incidents = [each for each in self.view.incidents() if each.moments.detected >= struck_unix_s]
        first = incidents[0] if incidents else None
        is_recovered = first is not None and first.state is IncidentState.RECOVERED
        with suppress(TimeoutError):  # remaining processes and files are counted below
            wait_until(lambda: not self.launched.processes() and not memory_files(self.job), "the end of all processes")
        return RecoveryOutcome(
            detected_s=None if first is None else first.moments.detected - struck_unix_s,
            next_step_s=next_step_s(self.job, struck_unix_s) if is_recovered else None,
            named="" if first is None else ", ".join([*map(str, first.culprit_ranks), *first.culprit_hosts]),
            losses=self.launched.losses(),
            num_orphans=len(self.launched.processes()),
            leaked=memory_files(self.job),
            phases={} if first is None else phase_seconds(first.moments),
        )


@contextmanager
def torchrun(root: Path, *, is_store_shared: bool) -> Iterator[RecoverySide]:
    """Run two agents that meet at a store of the first agent. A third agent is a spare: it waits for a place."""
    job = make_job_at(root)
    faults = FaultDirectory(root / "faults", PACE_S)
    port = free_port("127.0.0.1")
    side = _Torchrun(job, faults, port, is_store_shared)
    try:
        for number in range(2):
            side.start(number)
        wait_until(lambda: bool(job.records("step")), "the first step", GIVE_UP_S)
        side.start(2)
        yield side
    finally:
        side.end()


@dataclass
class _Torchrun:
    job: TrainJob
    faults: FaultDirectory
    port: int
    is_store_shared: bool
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, number: int) -> None:
        command: Sequence[str] = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "recovery",
            "--rdzv-conf", f"is_host={int(number == 0)}",
            "--max-restarts", "3", "-m", "tests.helpers.step_faults", str(self.job.config_file),
        ]  # fmt: skip
        sharing = {} if self.is_store_shared else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.job.root / f"agent-{number}.log").open("ab") as log:
            self.agents.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **self.faults.environment, **sharing},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def kill_host(self, *, is_driver: bool) -> float:
        """Kill an agent. The first one hosts the store, and so is the closest thing to a driver in torchrun."""
        agent = self.agents[0 if is_driver else 1]
        struck = time.time()
        for pid in [agent.pid, *descendants(agent.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()
        return struck

    def outcome(self, struck_unix_s: float) -> RecoveryOutcome:
        with suppress(TimeoutError):
            wait_until(lambda: all(agent.poll() is not None for agent in self.agents), "the agents", GIVE_UP_S)
        found = next_step_s(self.job, struck_unix_s)
        losses = {record["step"]: record["loss"] for record in self.job.records("step")}
        return RecoveryOutcome(None, found, "", losses, 0, ())

    def end(self) -> None:
        for agent in self.agents:
            for pid in [agent.pid, *descendants(agent.pid)] if agent.poll() is None else []:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()
