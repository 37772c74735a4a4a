"""Runs the programs of a job on one host: that of the elected driver, or the host that the configuration names.

A host starts the programs when its driver is elected. It keeps them running through an outage of etcd, in which no host
leads, and stops them when etcd names another leader or when its executor exits. So the programs run on two hosts only
briefly; even then, the lock of the event store prevents two daemons from writing. The first host writes the id of the
launch to the run directory, by which other hosts detect whether they share this directory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.bounded_files import read_below
from megatrain.contracts.files.whole_files import write_private
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.rounds import JobRecord
from megatrain.programs.supervisor import Supervisor
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.election import Election
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.executor.job_programs import ProgramSettings, reported_dashboard, running_programs

_logger = logging.getLogger(__name__)
_POLL_S = 0.5
_DRAIN_TIMEOUT_S = 10.0
"""The time that the other hosts of a finished job may take to send the rest of their streams."""
_MARK = "launch"
_MAX_MARK_BYTES = 1 << 10
_TRIES = 10
_TRY_S = 0.5
"""The file with the launch id is read up to _TRIES times, because a network file system may show a new file seconds
later."""


@dataclass(frozen=True, slots=True)
class ProgramRunnerParts:
    """The parts that a program runner uses.

    `leading` is set while this host's driver is elected, and always if the configuration names this host.
    """

    client: EtcdClient
    keys: JobKeys
    name: str
    """The name with which this host's driver campaigns."""
    leading: threading.Event
    programs: Callable[[], AbstractContextManager[Mapping[str, Supervisor]]]
    """A context that runs the programs and yields their supervisors by name."""
    why_incomplete: Callable[[threading.Event], str] = lambda closed: ""
    """Returns why the programs miss data on this host; empty if they do not. Takes seconds, unless the event is set."""


class ProgramRunner:
    """Runs the programs of the job while this host is responsible for them, until `close`."""

    def __init__(self, parts: ProgramRunnerParts) -> None:
        self._parts = parts
        self._closed = threading.Event()
        self._why_incomplete = ""
        self._supervisors: Mapping[str, Supervisor] = {}
        self._thread = RestartingThread("runner of the job's programs", self._run, self._closed)

    @property
    def problem(self) -> str:
        """The reason why the programs on this host do not work, or miss data; empty if no problem is known."""
        programs = [supervisor.problem for supervisor in self._supervisors.values()]
        return "; ".join(program for program in (self._thread.problem or self._why_incomplete, *programs) if program)

    def close(self) -> None:
        """Stop the programs. After the job's end, first wait for the data that the other hosts still send."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            if self._parts.leading.is_set() and not self._is_job_over():
                self._run_programs()

    def _run_programs(self) -> None:
        parts = self._parts
        with ExitStack() as running:
            self._supervisors = running.enter_context(parts.programs())
            running.callback(self._forget_problem)
            _logger.info("host %s runs the diagnosis of job %s", parts.name, parts.keys.job)
            self._why_incomplete = parts.why_incomplete(self._closed)
            if self._why_incomplete:
                _logger.warning("%s", self._why_incomplete)
            while not self._closed.wait(_POLL_S):
                if not parts.leading.is_set() and self._is_led_by_another_host():
                    _logger.info("another host drives job %s and runs its diagnosis", parts.keys.job)
                    return
            if self._is_job_over():
                self._wait_for_other_hosts()

    def _forget_problem(self) -> None:
        self._why_incomplete, self._supervisors = "", {}

    def _is_job_over(self) -> bool:
        try:
            return self._parts.client.get(self._parts.keys.end) is not None
        except CoordinationError:
            return False

    def _is_led_by_another_host(self) -> bool:
        """Return whether another host leads a job that continues; False while etcd is unavailable."""
        try:
            leader = Election(self._parts.client, self._parts.keys.election).leader()
        except CoordinationError:
            return False
        return leader is not None and leader.value != self._parts.name.encode() and not self._is_job_over()

    def _wait_for_other_hosts(self) -> None:
        """Wait until the other hosts have left, which each does once its streamer has sent all data."""
        parts = self._parts
        own, deadline = parts.keys.host(parts.name).encode(), time.monotonic() + _DRAIN_TIMEOUT_S
        hosts = KeyRange.prefix(parts.keys.directory("hosts"))
        while time.monotonic() < deadline:
            try:
                items = parts.client.read_all(hosts, has_values=False).items
            except CoordinationError:
                return
            if all(item.key == own for item in items):
                return
            time.sleep(_POLL_S)


def start_program_runner(
    settings: ProgramSettings, host: str, client: EtcdClient, record: JobRecord, leading: threading.Event
) -> ProgramRunner | None:
    """Start the program runner of this host; None if the configuration names another host.

    `host`: the name with which this host's driver campaigns; `leading` is set while that driver is elected.
    """
    keys, named = JobKeys(record.job), settings.config.diagnostics.daemon_host
    if named and named != host:
        return None
    if named:
        leading = threading.Event()
        leading.set()

    @contextmanager
    def programs() -> Iterator[Mapping[str, Supervisor]]:
        with (
            reported_dashboard(settings.etcd, keys, _logger.info),
            running_programs(settings, _logger.warning) as supervisors,
        ):
            yield supervisors

    def why_incomplete(closed: threading.Event) -> str:
        return why_not_shared(RunDirectory(settings.run), record, host, closed)

    return ProgramRunner(ProgramRunnerParts(client, keys, host, leading, programs, why_incomplete))


def leave_mark(run: RunDirectory, record: JobRecord) -> None:
    """Write the launch id to the run directory. Called on the first host only. A failed write is logged."""
    try:
        write_private(run.diagnosis / _MARK, f"{record.launch_id}\n".encode())
    except OSError as error:
        _logger.warning("%s cannot be written: %s", run.diagnosis / _MARK, error.strerror)


def why_not_shared(run: RunDirectory, record: JobRecord, host: str, closed: threading.Event) -> str:
    """Return a text about the data that is missing because the host's run directory is not shared.

    Empty if the directory is shared, or if `closed` is set.
    """
    for _ in range(_TRIES):
        if record.first_host == host or _read_mark(run) == record.launch_id or closed.wait(_TRY_S):
            return ""
    return (
        f"{run.root} on {host} is not that of {record.first_host}: the page and the daemon, which now run here, have "
        "only the data from now on; set job.run_directory to storage that all hosts share"
    )


def _read_mark(run: RunDirectory) -> str:
    try:
        return read_below(run.diagnosis, _MARK, _MAX_MARK_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
