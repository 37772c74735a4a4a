"""Which host runs the programs of a job: the one whose driver is elected, or the one that the configuration names.

Leadership decides which host begins. A host that has begun continues through an outage of etcd, in which no host leads,
and ends when another host is known to lead, or when this executor ends. So no two hosts go on for long, and an outage
takes neither page nor daemon away. Two daemons never write: the lock of the event store sees to that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.rounds import JobRecord
from megatrain.contracts.run_directory import RunDirectory
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.election import Election
from megatrain.coordination.lasting_thread import LastingThread
from megatrain.coordination.wire import KeyRange
from megatrain_launcher.executor.dashboard_notice import told_dashboard
from megatrain_launcher.executor.job_programs import ProgramSettings, running_programs
from megatrain_launcher.executor.launch_mark import why_not_shared

_logger = logging.getLogger(__name__)
_LOOK_S = 0.5
_LAST_WORDS_S = 10.0
"""So long hosts that leave a job which is over may take to bring away what they have streamed."""


@dataclass(frozen=True, slots=True)
class KeeperParts:
    """What a keeper uses. `leading` is set while this host's driver is elected."""

    client: EtcdClient
    keys: JobKeys
    name: str
    """With which this host's driver campaigns."""
    leading: threading.Event
    programs: Callable[[], AbstractContextManager[None]]
    """Has the programs run while it is entered."""
    why_poor: Callable[[threading.Event], str] = lambda closed: ""
    """Says what is missing where they run; looks for a while, but not longer than until the event is set."""


class ProgramKeeper:
    """Runs the programs of the job while it is for this host to do, until `close`."""

    def __init__(self, parts: KeeperParts) -> None:
        self._parts = parts
        self._closed = threading.Event()
        self._why_poor = ""
        self._thread = LastingThread("keeper of the job's programs", self._run, self._closed)

    @property
    def trouble(self) -> str:
        """What keeps the programs that run here from their work; empty where nothing does."""
        return self._thread.trouble or self._why_poor

    def close(self) -> None:
        """End the programs; those of a job that is over first take in what its hosts still send."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if self._parts.leading.is_set() and not self._is_job_over():
                self._keep()

    def _keep(self) -> None:
        parts = self._parts
        with ExitStack() as running:
            running.enter_context(parts.programs())
            running.callback(self._forget_trouble)
            _logger.info("host %s keeps the diagnosis of job %s", parts.name, parts.keys.job)
            self._why_poor = parts.why_poor(self._closed)
            if self._why_poor:
                _logger.warning("%s", self._why_poor)
            while not self._closed.wait(_LOOK_S):
                if not parts.leading.is_set() and self._is_anothers():
                    _logger.info("another host drives job %s and keeps its diagnosis", parts.keys.job)
                    return
            if self._is_job_over():
                self._hear_hosts_out()

    def _forget_trouble(self) -> None:
        self._why_poor = ""

    def _is_job_over(self) -> bool:
        try:
            return self._parts.client.get(self._parts.keys.end) is not None
        except CoordinationError:
            return False

    def _is_anothers(self) -> bool:
        """Say whether another host is known to lead a job that continues; while etcd is away none is."""
        try:
            leader = Election(self._parts.client, self._parts.keys.election).leader()
        except CoordinationError:
            return False
        return leader is not None and leader.value != self._parts.name.encode() and not self._is_job_over()

    def _hear_hosts_out(self) -> None:
        """Wait for the other hosts: each leaves when its streamer has brought away what it had."""
        parts = self._parts
        own, deadline = parts.keys.host(parts.name).encode(), time.monotonic() + _LAST_WORDS_S
        hosts = KeyRange.prefix(parts.keys.directory("hosts"))
        while time.monotonic() < deadline:
            try:
                items = parts.client.read_all(hosts, has_values=False).items
            except CoordinationError:
                return
            if all(item.key == own for item in items):
                return
            time.sleep(_LOOK_S)


def start_keeper(
    settings: ProgramSettings, host: str, client: EtcdClient, record: JobRecord, leading: threading.Event
) -> ProgramKeeper | None:
    """Have a host run the programs of its job when it is its turn; None where the configuration names another.

    `host`: with which name its driver campaigns; `leading` is set while that is elected.
    """
    keys, named = JobKeys(record.job), settings.config.diagnostics.daemon_host
    if named and named != host:
        return None
    if named:
        leading = threading.Event()
        leading.set()

    @contextmanager
    def programs() -> Iterator[None]:
        with told_dashboard(settings.etcd, keys, _logger.info), running_programs(settings, _logger.warning):
            yield

    def why_poor(closed: threading.Event) -> str:
        return why_not_shared(RunDirectory(settings.run), record, host, closed)

    return ProgramKeeper(KeeperParts(client, keys, host, leading, programs, why_poor))
