"""Runs the programs of a job that installed distributions provide: the diagnostics daemon and the web page.

A distribution declares an entry point in the group `megatrain.job_programs`: a function with the keywords `config`,
`run` and `etcd` (command-line flags) that returns commands by name. One host of the job runs the programs. Training
does not depend on them: a program that cannot be started, or that exits, is reported and started again after a pause,
unless a restart cannot help. If the function raises an error, this is reported, and its programs do not run. Each
program has a supervisor thread, so that no program affects another.

The address of the web page is reported when the page is first served, and whenever the address changes.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.config.config import Config
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DashboardRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.programs.child_process import ChildProcess
from megatrain.programs.supervisor import Supervisor
from megatrain_job.commands.etcd_flags import etcd_arguments, etcd_environment
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.follower import Follower
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.watch_event import WatchEvent
from megatrain_job.coordination.wire import KeyRange

ENTRY_POINT_GROUP = "megatrain.job_programs"


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """The settings with which a job's programs are started."""

    config: Config
    run: Path
    etcd: EtcdSettings
    environment: Mapping[str, str]


@contextmanager
def running_programs(settings: ProgramSettings, report: Callable[[str], None]) -> Iterator[Mapping[str, Supervisor]]:
    """Run all installed programs of the job during the block, and yield their supervisors by name.

    `report` is called with messages, also from the programs' threads.
    """
    is_over = threading.Event()
    supervisors = {
        name: Supervisor(name, _starter(command, settings), settings.run / "logs" / f"{name}.log", report)
        for name, command in _commands(settings, report).items()
    }
    threads = [
        threading.Thread(target=supervisor.run, args=(is_over,), name=name) for name, supervisor in supervisors.items()
    ]
    try:
        for thread in threads:
            thread.start()
        yield supervisors
    finally:
        is_over.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _commands(settings: ProgramSettings, report: Callable[[str], None]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            commands = entry_point.load()(config=settings.config, run=settings.run, etcd=etcd_arguments(settings.etcd))
            found |= {str(name): [str(part) for part in command] for name, command in commands.items()}
        except Exception as error:  # noqa: BLE001 -- another distribution's code may fail in any way
            report(f"{entry_point.name} cannot be started: {type(error).__name__}: {error}; the job runs without it")
    return found


def _starter(command: Sequence[str], settings: ProgramSettings) -> Callable[[Path], ChildProcess]:
    environment = {**settings.environment, **etcd_environment(settings.etcd)}
    return lambda log: ChildProcess(command, log=log, environment=environment)


@contextmanager
def reported_dashboard(settings: EtcdSettings, keys: JobKeys, report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` with the address of the web page during the block, once for each new address."""
    last_url = ""

    def take(event: WatchEvent) -> None:
        nonlocal last_url
        for item in event.written:
            with suppress(CoordinationError):  # the page's program replaces an unreadable record
                record = decode(DashboardRecord, item.value, keys.dashboard)
                way_in = f" (sign in with the token in {record.token_file})" if record.token_file else ""
                if record.url != last_url:
                    report(f"dashboard: {record.url}{way_in}")
                    last_url = record.url

    with EtcdClient(settings) as client, Follower(client, KeyRange.key(keys.dashboard), take):
        yield
