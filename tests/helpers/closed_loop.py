"""A paced job of two hosts with two ranks each and a spare, with the diagnostics daemon beside it: the whole loop."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.contracts.records.host_verdict import HostVerdict, VerdictConfidence, VerdictOutcome
from megatrain.contracts.records.incident import Incident, IncidentKind
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.job_under_launch import (
    OVERLAPPED,
    WORKERS,
    LaunchedJob,
    LaunchedJobView,
    ViewedJob,
    make_launched_job,
)
from tests.helpers.namespaces import HostNetwork
from tests.helpers.paced_train import PaceDirectory, StepPace
from tests.helpers.source_tree import ROOT
from tests.helpers.step_faults import FaultDirectory
from tests.helpers.waiting import DEADLINE_S, wait_until

HOSTS = ("host-0", "host-1", "host-2")
SPARE = "host-2"
TRAIN, MANAGEMENT = "train", "mgmt"
_ENDLESS = 100_000


@dataclass
class ClosedLoop(ViewedJob):
    """A running job with its daemon."""

    pace: PaceDirectory
    network: HostNetwork | None = None

    def verdicts(self, confidence: VerdictConfidence = VerdictConfidence.HIGH) -> list[HostVerdict]:
        return [one for one in self.view.all("verdicts", HostVerdict) if one.confidence is confidence]

    def outcomes(self) -> dict[str, VerdictOutcome]:
        return {one.verdict_id: one for one in self.view.all("outcomes", VerdictOutcome)}

    def wait_for_verdict(self, confidence: VerdictConfidence = VerdictConfidence.HIGH) -> HostVerdict:
        """Return the first verdict with that confidence."""
        wait_until(lambda: bool(self.verdicts(confidence)), "a verdict")
        return self.verdicts(confidence)[0]

    def wait_for_any_verdict(self) -> HostVerdict:
        """Return the first verdict."""
        wait_until(lambda: bool(self.view.all("verdicts", HostVerdict)), "a verdict")
        return self.view.all("verdicts", HostVerdict)[0]

    def evictions(self) -> list[Incident]:
        return [incident for incident in self.view.incidents() if incident.kind is IncidentKind.STRAGGLER]

    def step_time_s(self, first: int, last: int) -> float:
        """Return the median time of the steps from `first` to `last`; the later time of a repeated step."""
        times = {record["step"]: record["duration_s"] for record in self.launched.step_records()}
        found = [duration for step, duration in times.items() if first <= step <= last]
        return statistics.median(found)


@contextmanager
def closed_loop(
    root: Path,
    *changes: Mapping[str, Mapping[str, Any]],
    pace: StepPace | None = None,
    has_network: bool = False,
    hosts: Sequence[str] = HOSTS,
    num_training: int = 2,
    steps: int = _ENDLESS,
) -> Iterator[ClosedLoop]:
    """Start etcd, the daemon, `num_training` hosts and the other `hosts` as spares; wait until the job trains.

    `has_network`: each host is in its own network namespace, on a network for training and one for everything else.
    """
    interface = {"runtime": {"network_interface": TRAIN}} if has_network else {}
    quiet = {"runtime": {"save_grace_s": 15.0}, "log": {"interval": 1000}, "train": {"gc_interval": 0}}
    job = make_launched_job(root, steps, quiet, OVERLAPPED, interface, *changes)
    directory = root / "etcd"
    directory.mkdir()
    with ExitStack() as stack:
        network = stack.enter_context(HostNetwork(len(HOSTS), (TRAIN, MANAGEMENT))) if has_network else None
        addresses = [] if network is None else [network.own_address(MANAGEMENT)]
        etcd = stack.enter_context(EtcdServers(directory, 1, addresses=addresses))
        urls = etcd.urls if network is None else [each.replace("127.0.0.1", addresses[0]) for each in etcd.urls]
        spares = str(len(hosts) - num_training)
        arguments = ("--nnodes", str(num_training), "--spares", spares, "--nproc-per-node", str(WORKERS))
        paced = PaceDirectory(root / "pace", pace or StepPace())
        launched = stack.enter_context(
            LaunchedJob(
                job,
                urls,
                FaultDirectory(root / "faults"),
                arguments,
                module="tests.helpers.paced_train",
                environment=paced.environment,
                is_forked=True,
            )
        )
        view = LaunchedJobView.of(job, etcd.urls)
        stack.callback(view.client.close)
        listen = () if network is None else ("--address", addresses[0])
        loop = ClosedLoop(launched, view, paced, network)
        loop.start_hosts(hosts, num_training, network, TRAIN)
        stack.enter_context(running_daemon(root, job.files.root, job.config.job.name, urls, *listen))
        launched.wait_for_step(8)
        wait_until(lambda: set(view.hosts()) == set(hosts), "all hosts")
        yield loop


@contextmanager
def running_daemon(
    root: Path, run: Path, job: str, urls: Sequence[str], *more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the diagnostics daemon of a job during the block."""
    command = [
        sys.executable, "-m", "megatrain_diagnostics.daemon",
        "--run", str(run), "--job", job, "--rdzv-endpoint", ",".join(urls), *more,
    ]  # fmt: skip
    with (root / "daemon.log").open("ab") as log:
        daemon = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield daemon
    finally:
        daemon.terminate()
        try:
            daemon.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
