"""The diagnostics daemon of a job: receives the hosts' streams, stores their rows, and runs the live analyses.

No program waits for the daemon: it may be killed at any moment, and started again anywhere with access to the run
directory. All rows that it has acknowledged are on disk; hosts send the others again.

While etcd is unavailable, streams continue, all rows are stored, and rows of known rounds are analyzed. Everything that
needs etcd is delayed: the analysis of new rounds, configuration changes, verdicts, requests for full spans, and the
daemon's report. A daemon that starts during that time uses the configuration passed by its launch, and hosts cannot
find its address yet. A daemon that is started by hand reads the configuration from the job's record. No port is opened
before the configuration is known, because it sets which hosts can reach the port, and whether a token is required.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megatrain.commands.argument_types import utf8_path, utf8_text
from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.errors import ConfigError, DataError, MegatrainError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.diag_records import DaemonRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.programs.own_output import keep_own_log
from megatrain.programs.stop_signals import stopped_by_signals
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics.analysis.device_states import WINDOW_S
from megatrain_diagnostics.collector.admission import Admission, RowRateLimiter
from megatrain_diagnostics.collector.configuration import Configuration, reachable_address, usual_address
from megatrain_diagnostics.collector.consumers import ConsumerThread
from megatrain_diagnostics.collector.counters import IngestStatistics, LostRowsReporter
from megatrain_diagnostics.collector.event_server import EventServer
from megatrain_diagnostics.collector.ingest import Ingest
from megatrain_diagnostics.collector.rounds_known import JobWatch, KnownRounds
from megatrain_diagnostics.collector.rows_ahead import RowsAhead
from megatrain_diagnostics.collector.settings import DaemonSettings, add_daemon_arguments
from megatrain_diagnostics.controller.controller import Controller
from megatrain_diagnostics.controller.device_watch import DeviceFindings, DeviceWatch
from megatrain_diagnostics.events.roster import newest_round
from megatrain_diagnostics.events.source import Where, matching
from megatrain_diagnostics.events.tables import Groups, Ranks, Xids, num_rows, select
from megatrain_diagnostics.metrics.daemon_report import DaemonReporter
from megatrain_diagnostics.metrics.job_metrics import MetricsParts, served_metrics
from megatrain_diagnostics.metrics.job_records import SaveFailures
from megatrain_diagnostics.metrics.state_writer import StateWriter
from megatrain_diagnostics.metrics.training_metrics import TrainingMetrics
from megatrain_diagnostics.store.event_store import EventStore
from megatrain_diagnostics.store.segments import StoreError
from megatrain_job.commands.etcd_flags import add_etcd_arguments, etcd_flags
from megatrain_job.coordination.announcement import Announcement
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.jobs.etcd_job import EtcdJob

_logger = logging.getLogger(__name__)
_POLL_S = 1.0
_MAINTENANCE_S = 60.0
_LOCK_PATIENCE_S = 15.0
"""Time to wait for the store's lock: a daemon that is being replaced may still be writing its last batches."""
_GOODBYE_S = 3.0


def run_daemon(settings: DaemonSettings, stop: threading.Event) -> None:
    """Serve until `stop` is set.

    Raises: StoreError when the run's events cannot be written; ConfigError when the address is not available.
    """
    keys = JobKeys(settings.job)
    with ExitStack() as closing:
        store = closing.enter_context(_opened_store(RunDirectory(settings.run).events, stop))
        statistics, rounds, configuration = IngestStatistics(), KnownRounds(), Configuration(settings)
        client = closing.enter_context(EtcdClient(settings.etcd))
        watch = JobWatch(client, keys, rounds, configuration.take)
        closing.callback(watch.close)
        session = secrets.token_hex(8)
        controller = Controller(client, keys.job, session, lambda: configuration.section, time.time(),
                                DeviceFindings(store).with_devices)  # fmt: skip
        training = TrainingMetrics()
        devices = DeviceWatch(lambda: configuration.section.telemetry_interval_s)
        consumers = ConsumerThread(
            [controller, training, devices],
            statistics,
            RowsAhead(lambda: rounds.latest_in_etcd, statistics.count_skipped_rows),
        )
        closing.callback(consumers.close)
        if not configuration.wait(stop):
            return
        _recall(store, rounds, consumers)
        ingest = Ingest(store, Admission(rounds, RowRateLimiter()), statistics, consumers)
        closing.callback(ingest.close)
        token = secrets.token_hex(32)
        server = _listening(settings, configuration.section, ingest, token)
        failures = SaveFailures()
        etcd = EtcdJob(client, keys, failures.follow)
        closing.callback(etcd.close)
        parts = MetricsParts(training, statistics, controller, store, etcd, failures)
        metrics = served_metrics(parts, keys.job, configuration.checkpoints, configuration.section)
        record = DaemonRecord(
            host=socket.gethostname(), session=session, address=reachable_address(settings, server.address),
            port=server.port, token=token, metrics_port=closing.enter_context(metrics), started_unix_s=time.time(),
        )  # fmt: skip
        announcement = Announcement(client, keys.daemon, record)
        _logger.info("daemon of job %s listens at %s:%d, events in %s", keys.job, record.address, record.port,
                     store.directory)  # fmt: skip
        maintenance = threading.Thread(target=_maintain, args=(store, configuration, stop), daemon=True)
        maintenance.start()
        lost_rows, holding = LostRowsReporter(statistics), StoreWatch(store)

        def problem() -> str:
            return ingest.problem or holding.problem

        state = StateWriter(
            RunDirectory(settings.run).diagnosis,
            keys.job,
            record,
            controller,
            statistics,
            problem,
        )
        report = DaemonReporter(
            client, keys, record, (controller, statistics, training, devices), problem, lambda: etcd.last_poll.snapshot
        )
        while not stop.wait(_POLL_S):
            holding.poll()
            lost_rows.report(time.monotonic())
            state.write(time.time())
            report.write(time.time())
        _logger.info("the daemon exits")
        announcement.close()
        server.stop(_GOODBYE_S)
        maintenance.join()


class StoreWatch:
    """Restores the store when its directory was removed during the run. For one thread."""

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self.problem = ""
        """The reason why nothing can be stored; empty when storing works."""

    def poll(self) -> None:
        """Create the directory again if it was removed."""
        try:
            if self._store.retake():
                _logger.error("%s was removed from outside: the events stored there are lost; new events are stored",
                              self._store.directory)  # fmt: skip
            self.problem = ""
        except StoreError as error:
            self.problem = str(error)


def _opened_store(directory: Path, stop: threading.Event) -> EventStore:
    """Open the run's events; wait for a daemon that is about to exit. Raises: StoreError."""
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            return EventStore(directory)
        except StoreError:
            if time.monotonic() > deadline or stop.wait(_POLL_S / 4):
                raise


def _recall(store: EventStore, rounds: KnownRounds, consumers: ConsumerThread) -> None:
    """Pass on the stored ranks and GPU errors: hosts send them once, so an earlier daemon may have received them."""
    try:
        ranks = store.read(Ranks)
        ranks = select(ranks, ranks.round <= rounds.latest_in_etcd)
        if num_rows(ranks):
            rounds.add_ranks(ranks)
            newest = Where(rounds=(newest_round(ranks),))
            consumers.put(store.read(Groups, newest))
            consumers.put(select(ranks, matching(ranks, newest)))
        consumers.put(store.read(Xids, Where(first_ns=time.time_ns() - int(WINDOW_S * 1e9))))
    except DataError as error:
        _logger.warning("the stored ranks cannot be read; they are unknown until hosts report them again: %s", error)


def _listening(settings: DaemonSettings, section: DiagnosticsConfig, ingest: Ingest, token: str) -> EventServer:
    address = settings.address or section.daemon_address or usual_address(settings.etcd)
    port = section.daemon_port if settings.port is None else settings.port
    try:
        return EventServer(ingest, address, port, token)
    except OSError as error:
        problem = f"diagnostics.daemon_address={address!r}, daemon_port={port}: cannot listen there: {error}"
        raise ConfigError([f"{problem}; name an address of this machine and a port that is free"]) from error


def _maintain(store: EventStore, configuration: Configuration, stop: threading.Event) -> None:
    # the first run is immediate, so that a daemon that is restarted often keeps the limits too
    while True:
        try:
            store.maintain(configuration.retention)
        except StoreError as error:
            _logger.warning("segments could not be merged or removed: %s", error)
        if stop.wait(_MAINTENANCE_S):
            return


def serve(settings: DaemonSettings) -> int:
    """Run the daemon in this process until a signal arrives; return the exit code.

    Raises: MegatrainError.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    run_daemon(settings, stopped_by_signals())
    return ExitCode.OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatrain_diagnostics.daemon", allow_abbrev=False)
    parser.add_argument("--run", required=True, type=utf8_path, metavar="DIR", help="the run directory")
    parser.add_argument("--job", required=True, type=utf8_text, metavar="NAME")
    parser.add_argument("--section", default="", metavar="JSON",
                        help="section [diagnostics] (default: wait for the job's record, use its section)")  # fmt: skip
    parser.add_argument("--checkpoints", default=None, type=utf8_path, metavar="DIR",
                        help="directory of the job's checkpoints (default: in the run directory)")  # fmt: skip
    add_daemon_arguments(parser)
    add_etcd_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        etcd = etcd_flags(args).settings(os.environ)
        settings = DaemonSettings(
            run=args.run,
            job=args.job,
            etcd=etcd,
            address=args.address,
            port=args.port,
            section=decode(DiagnosticsConfig, args.section, "--section") if args.section else None,
            checkpoints=args.checkpoints,
        )
        return serve(settings)
    except MegatrainError as error:
        print(f"megatrain diag daemon: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    keep_own_log()
    sys.exit(main())
