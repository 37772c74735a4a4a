"""A job of two hosts and a spare whose network or etcd a test interrupts, and the measured effects."""

from __future__ import annotations

import itertools
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import HostPhase
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.records.rounds import Round
from megatrain.run_files.run_directory import own_box_paths
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.job_under_launch import WORKERS, LaunchedJob, LaunchedJobView, ViewedJob, make_launched_job
from tests.helpers.namespaces import HostNetwork
from tests.helpers.processes import descendants, is_running
from tests.helpers.step_faults import FaultDirectory
from tests.helpers.waiting import DEADLINE_S, wait_until

HOSTS = ("host-0", "host-1", "host-2")
TRAIN, MANAGEMENT = "train", "mgmt"
PACE_S = 0.08
_ENDLESS = 100_000


@dataclass
class OutageJob(ViewedJob):
    """A running job. Times are unix seconds."""

    etcd: EtcdServers
    network: HostNetwork | None
    stopped_unix_s: float | None = None
    """The time at which the last worker of a host that was cut off ended; None: not checked yet."""

    def cut(self, hosts: Sequence[str], *networks: str) -> float:
        """Cut hosts off networks; return the time."""
        assert self.network is not None
        began = time.time()
        for host in hosts:
            for network in networks:
                self.network.cut(HOSTS.index(host), network)
        return began

    def reconnect(self, hosts: Sequence[str], *networks: str) -> float:
        assert self.network is not None
        for host in hosts:
            for network in networks:
                self.network.reconnect(HOSTS.index(host), network)
        return time.time()

    def workers_of(self, host: str) -> list[int]:
        """Return the live processes that train for a host, except its standby server."""
        found = []
        for pid in descendants(self.launched.executors[host].pid):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("mt-rank-") and is_running(pid):
                    found.append(pid)
        return found

    def wait_until_stopped(self, host: str) -> float:
        """Wait until all workers of a host have ended; return the time."""
        wait_until(lambda: not self.workers_of(host), f"{host} to stop its workers")
        self.stopped_unix_s = time.time()
        return self.stopped_unix_s

    def wait_seconds(self, since: float, seconds: float) -> None:
        """Let an outage last. The wait is for the clock: no event ends it."""
        wait_until(lambda: time.time() >= since + seconds, "the clock", seconds + DEADLINE_S)

    def first_step_of_round(self, number: int) -> float | None:
        """Return when a round completed its first step."""
        written = next((one.created_unix_s for one in self.view.rounds() if one.number == number), None)
        times = [record["unix_time_s"] for record in self.launched.step_records()]
        return None if written is None else next((time_s for time_s in times if time_s > written), None)

    def wait_for_round(self, number: int) -> Round:
        wait_until(lambda: self.first_step_of_round(number) is not None, f"a step of round {number}")
        return self.view.rounds()[number - 1]

    def step_times(self, since: float) -> tuple[float, float]:
        """Return the median time of a step, and the longest of those that ended after `since`.

        A step's time begins at the end of the previous step. After a save it is only the step's own duration, because a
        save waits for the disk.
        """
        saves = {
            int(path.name.rpartition("-")[2]) for path in self.launched.job.files.checkpoints.glob("*/step-*[0-9]")
        }
        interval = self.launched.job.config.checkpoint.interval
        times: list[tuple[float, float]] = []
        for before, after in itertools.pairwise(self.launched.step_records()):
            is_after_save = before["step"] % interval == 0 or before["step"] in saves
            whole_s = after["unix_time_s"] - before["unix_time_s"]
            times.append((after["unix_time_s"], after["duration_s"] if is_after_save else whole_s))
        return statistics.median(time_s for _, time_s in times), max(time_s for end, time_s in times if end > since)

    def phase_of(self, host: str) -> HostPhase | None:
        status = self.view.statuses().get(host)
        return None if status is None else status.phase

    def sessions(self) -> dict[str, str]:
        return {host: record.session for host, record in self.view.hosts().items()}

    def is_registered_as(self, sessions: Mapping[str, str]) -> Callable[[], bool]:
        return lambda: self.sessions() == dict(sessions)

    def repeated_losses_differ(self) -> list[int]:
        """Return the repeated steps whose losses are not the same, bit by bit."""
        known: dict[int, float] = {}
        records = self.launched.step_records()
        return [
            record["step"] for record in records if known.setdefault(record["step"], record["loss"]) != record["loss"]
        ]

    def end(self) -> None:
        """Let the job save and stop; check that all processes end in order and nothing is left."""
        codes = self.stop()
        assert set(codes.values()) == {int(ExitCode.SAVED_AND_STOPPED)}, codes
        assert self.left_behind() == []
        assert self.repeated_losses_differ() == []

    def stop(self) -> dict[str, int]:
        """Let the job save and stop as a scheduler would; return the exit codes of the living executors."""
        living = {host: each for host, each in self.launched.executors.items() if each.poll() is None}
        trainer = next(host for host in living if self.phase_of(host) is not HostPhase.PARKED)
        living[trainer].send_signal(signal.SIGTERM)
        return {host: self.launched.finish(host) for host in living}

    def left_behind(self) -> list[str]:
        """Return the processes and the files in memory that still exist although the job has ended."""

        def left() -> list[str]:
            return [*map(str, self.launched.processes()), *self.memory_files()]

        with suppress(TimeoutError):
            wait_until(lambda: not left(), "the end of all processes")
        return left()

    def memory_files(self) -> list[str]:
        root = self.launched.job.root
        return sorted(path.name for path in [*own_box_paths(root / "boxes"), *root.glob("megatrain-arena*")])

    def recoveries(self) -> list[Incident]:
        """Return the incidents with a response."""
        return [incident for incident in self.view.incidents() if incident.kind is not IncidentKind.CONTROL_PLANE]

    def holds(self) -> list[Incident]:
        found = [incident for incident in self.view.incidents() if incident.kind is IncidentKind.CONTROL_PLANE]
        assert all(one.state is IncidentState.HELD and one.action == "hold" for one in found)
        return found

    def kill_a_rank(self, rank: int) -> float:
        """Request that a rank is killed soon; return the time of its death."""
        number = len(list(self.launched.faults.root.glob("[0-9]*.struck")))
        self.launched.faults.fail_at(rank, self.newest_step() + 4, "kill")
        wait_until(lambda: self.launched.faults.struck_unix_s(number) is not None, "the fault")
        struck = self.launched.faults.struck_unix_s(number)
        assert struck is not None
        return struck


@contextmanager
def outage_job(
    root: Path,
    *changes: Mapping[str, Mapping[str, Any]],
    num_members: int = 1,
    has_network: bool = False,
    hosts: Sequence[str] = HOSTS,
    steps: int = _ENDLESS,
    ranks_per_host: int = WORKERS,
    pace_s: float = PACE_S,
) -> Iterator[OutageJob]:
    """Start etcd, two hosts, and the other `hosts` as spares; wait until all of them train, or wait as spares.

    `has_network`: each host is in its own network namespace, on a network for training and one for etcd.
    """
    interface = {"runtime": {"network_interface": TRAIN}} if has_network else {}
    quiet = {
        "runtime": {"step_timeout_s": 120.0, "save_grace_s": 5.0}, "log": {"interval": 1000},
        "diagnostics": {"is_streamed": False},
    }  # fmt: skip
    job = make_launched_job(root, steps, quiet, interface, *changes)
    directory = root / "etcd"
    directory.mkdir()
    with ExitStack() as stack:
        network = stack.enter_context(HostNetwork(len(HOSTS), (TRAIN, MANAGEMENT))) if has_network else None
        addresses = [] if network is None else [network.own_address(MANAGEMENT)]
        etcd = stack.enter_context(EtcdServers(directory, num_members, addresses=addresses))
        urls = etcd.urls if network is None else [each.replace("127.0.0.1", addresses[0]) for each in etcd.urls]
        arguments = ("--nnodes", "2", "--spares", str(len(hosts) - 2), "--nproc-per-node", str(ranks_per_host))
        faults = FaultDirectory(root / "faults", pace_s)
        launched = stack.enter_context(LaunchedJob(job, urls, faults, arguments, is_forked=True))
        view = LaunchedJobView.of(job, etcd.urls)
        stack.callback(view.client.close)
        running = OutageJob(launched, view, etcd, network)
        running.start_hosts(hosts, 2, network, TRAIN)
        launched.wait_for_step(8)
        wait_until(lambda: set(view.hosts()) == set(hosts), "all hosts")
        yield running
