"""The checks of every recovery: the named culprit, the duration, the unchanged losses, and that nothing is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain.run_files.run_directory import own_box_paths
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.job_history import check_history
from tests.helpers.job_under_launch import LaunchedJob, LaunchedJobView, make_launched_job
from tests.helpers.processes import descendants, words_of
from tests.helpers.step_faults import FaultDirectory
from tests.helpers.train_process import TrainJob
from tests.helpers.waiting import DEADLINE_S, wait_until

STEPS = 40
INTERVAL = 5
"""Steps between two checkpoints."""
PACE_S = 0.08
ENDLESS = 1_000_000
HOSTS = ("host-0", "host-1")
NOTHING: Mapping[str, str] = MappingProxyType({})
ARGUMENTS = ("--local-addr", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A launched job and the records that a test reads."""

    job: TrainJob
    faults: FaultDirectory
    launched: LaunchedJob
    view: LaunchedJobView
    etcd: EtcdServers

    def finish(self, hosts: Sequence[str] = HOSTS) -> int:
        """Wait for the end of the job and return its exit code."""
        codes = {self.launched.finish(host) for host in hosts}
        assert len(codes) == 1, {host: self.launched.log(host)[-2000:] for host in hosts}
        return codes.pop()

    def struck_unix_s(self, number: int = 0) -> float:
        """Wait for a fault and return its time."""
        wait_until(lambda: self.faults.struck_unix_s(number) is not None, f"fault {number}", deadline_s=2 * DEADLINE_S)
        struck = self.faults.struck_unix_s(number)
        assert struck is not None
        return struck

    def kill_host(self, host: str) -> float:
        """Kill a host's executor, and with it its workers; return the time, in unix seconds."""
        struck = time.time()
        self.launched.executors[host].kill()
        self.launched.executors[host].wait()
        return struck

    def pids(self, name: str, host: str = "") -> list[int]:
        """Return the processes of this job whose short name is `name`, of one host's executor or of all executors.

        Processes that such a process forked itself, such as a worker's watchdog, have its name and are not included.
        """
        found = self.launched.processes()
        if host:
            of_host = set(descendants(self.launched.executors[host].pid))
            found = [pid for pid in found if pid in of_host]
        named = [pid for pid in found if _short_name(pid) == name]
        forked = {child for pid in named for child in descendants(pid)}
        return [pid for pid in named if pid not in forked]

    def writers(self, host: str) -> list[int]:
        """Return the checkpoint writers of a host, which are not children of its executor."""
        arena = f".{host}".encode()
        return [
            pid
            for pid in self.launched.processes()
            if any(b"megatrain-arena" in word and word.endswith(arena) for word in words_of(pid))
        ]

    def other_than_driver(self) -> str:
        """Return a host of the newest round that does not drive the job."""
        driver = self.view.driver()
        return next(part.host for part in reversed(self.view.rounds()[-1].hosts) if part.host != driver)

    def only_incident(self) -> Incident:
        """Return the only incident of the job; a second one is a false alarm or a missed cause."""
        incidents = self.view.incidents()
        if len(incidents) != 1:
            shown = "\n".join(str(incident) for incident in incidents)
            logs = "\n".join(f"--- {host}\n{self.launched.log(host)[-6000:]}" for host in self.launched.executors)
            raise AssertionError(f"{len(incidents)} incidents:\n{shown}\n{logs}")
        return incidents[0]

    def save_and_stop(self) -> None:
        """Let a job without an end save and stop; all living hosts leave in order."""
        living = [host for host, process in self.launched.executors.items() if process.poll() is None]
        trainer = next(part.host for part in self.view.rounds()[-1].hosts if part.host in living)
        self.launched.executors[trainer].send_signal(signal.SIGTERM)
        code = self.finish(living)
        assert code == ExitCode.SAVED_AND_STOPPED, code

    def check_first_losses(self, undisturbed_losses: Mapping[int, float]) -> None:
        """Check that each step has the loss of the undisturbed job, up to the last step of that job."""
        losses = self.launched.losses()
        steps = range(1, min(max(losses), len(undisturbed_losses)) + 1)
        assert [losses[step] for step in steps] == [undisturbed_losses[step] for step in steps]

    def check_history(self) -> None:
        """Check all revisions of this job's keys in etcd."""
        assert check_history(self.view.client, self.view.keys) == len(self.view.rounds())

    def check_nothing_left(self) -> None:
        """Wait until all processes, black boxes and snapshots in memory are gone."""

        def left() -> list[Any]:
            boxes = [path.name for path in own_box_paths(self.job.root / "boxes")]
            arenas = [path.name for path in self.job.root.glob("megatrain-arena*")]
            return [*self.launched.processes(), *boxes, *arenas]

        try:
            wait_until(lambda: not left(), "the end of all processes")
        except TimeoutError:
            raise AssertionError(f"left behind: {left()}") from None

    def check_recovered(self, incident: Incident, struck_unix_s: float) -> None:
        """Check that an incident was noticed and is closed. benchmarks/recovery.py measures how soon."""
        assert incident.state is IncidentState.RECOVERED, incident
        assert incident.moments.first_step is not None
        assert struck_unix_s <= incident.moments.detected <= incident.moments.first_step, incident


def _short_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def running_job(
    root: Path,
    *changes: Mapping[str, Mapping[str, Any]],
    hosts: Sequence[str] = HOSTS,
    spare: str = "",
    nnodes: str = "2",
    ranks_per_host: int = 1,
    pace_s: float = PACE_S,
    orders: Sequence[tuple[Any, ...]] = (),
    has_daemon: bool = False,
    enter: Sequence[str] = (),
    module: str = LaunchedJob.module,
    environment: Mapping[str, str] = NOTHING,
    arguments_of: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[RunningJob]:
    """Launch a job of two hosts on a real etcd, and a spare once it runs.

    Hosts stream only if they run a daemon. orders: the arguments of `fail_at`; enter: the start of the command line of
    a host that runs elsewhere. module, environment: the module of the workers, and their environment variables.
    arguments_of: by host, further arguments of its launch.
    """
    usual = {
        "log": {"interval": 1000}, "checkpoint": {"interval": INTERVAL}, "diagnostics": {"is_streamed": has_daemon},
        # The first steps of a job with a later end have the same losses.
        "optimizer": {"lr_decay_steps": STEPS},
    }  # fmt: skip
    job = make_launched_job(root, STEPS, usual, *changes)
    faults = FaultDirectory(root / "faults", pace_s)
    for order in orders:
        faults.fail_at(*order)
    (root / "etcd").mkdir()
    with EtcdServers(root / "etcd") as etcd, ExitStack() as stack:
        spares = ("--spares", "1") if spare else ()
        arguments = ("--nnodes", nnodes, *spares, "--nproc-per-node", str(ranks_per_host), *ARGUMENTS)
        launched = stack.enter_context(
            LaunchedJob(job, etcd.urls, faults, arguments, module, environment, has_daemon=has_daemon, is_forked=True)
        )
        view = LaunchedJobView.of(job, etcd.urls)
        stack.callback(view.client.close)
        for host in hosts:
            launched.start(host, *arguments_of.get(host, ()), enter=enter)
        wait_until(lambda: len(view.rounds()) > 0, "the first round", deadline_s=2 * DEADLINE_S)
        if spare:
            launched.start(spare, enter=enter)
            wait_until(lambda: spare in view.statuses(), "the spare", deadline_s=2 * DEADLINE_S)
        yield RunningJob(job, faults, launched, view, etcd)
