"""`python -m megatrain_diagnostics.streamer --settings JSON`: the streamer, which the executor of a host starts."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatrain.contracts.black_box.values import read_clock_base
from megatrain.contracts.errors import ConfigError, MegatrainError
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.programs.background import lower_process_priority
from megatrain.programs.own_output import keep_own_log
from megatrain.programs.stop_signals import stopped_by_signals
from megatrain_diagnostics.devices.supervisor import DeviceSupervisor
from megatrain_diagnostics.metrics.exposition import HostCollector, registry_of
from megatrain_diagnostics.metrics.server import MetricsServer, read_token
from megatrain_diagnostics.streamer.rank_tail import HostClock
from megatrain_diagnostics.streamer.settings import StreamerSettings
from megatrain_diagnostics.streamer.silence import ExpectedRanks
from megatrain_diagnostics.streamer.stacks import DumpTarget, StackWatch, targets_in
from megatrain_diagnostics.streamer.streamer import Streamer
from megatrain_diagnostics.wire.discovery import WatchedDaemon
from megatrain_diagnostics.wire.sender import Sender, SenderLimits
from megatrain_job.commands.etcd_flags import add_etcd_arguments, etcd_flags
from megatrain_job.coordination.client import EtcdClient

_logger = logging.getLogger(__name__)
_NICENESS = 10
_FLUSH_S = 3.0
"""Less than the time that the executor waits for the streamer to exit."""


def main(arguments: Sequence[str]) -> int:
    """Stream until a signal arrives; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatrain_diagnostics.streamer", description=__doc__)
    parser.add_argument("--settings", required=True, metavar="JSON", help="StreamerSettings as JSON")
    add_etcd_arguments(parser)
    args = parser.parse_args(arguments)
    closed = stopped_by_signals()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        lower_process_priority(_NICENESS)
        settings = decode(StreamerSettings, args.settings, "--settings")
        with EtcdClient(etcd_flags(args).settings(os.environ)) as client:
            _stream(settings, client, closed)
    except MegatrainError as error:
        print(f"streamer: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    return 0


def _stream(settings: StreamerSettings, client: EtcdClient, closed: threading.Event) -> None:
    clock = HostClock(read_clock_base())
    keys = JobKeys(settings.job)
    finder = WatchedDaemon(client, keys)
    expected = ExpectedRanks(client, keys, settings.host)
    limits = SenderLimits(spool_bytes=settings.spool_bytes)
    sender = Sender(settings.host, finder, settings.own_directory / "spool", limits, clock.now_ns)
    boxes = Path(settings.black_box_directory)

    def targets() -> Sequence[DumpTarget]:
        return targets_in(boxes, settings.box_prefix, settings.host) if settings.black_box_directory else ()

    stacks = StackWatch(settings.host, targets, sender.send, clock.now_ns)
    devices = None
    if settings.telemetry_interval_s:
        devices = DeviceSupervisor(settings.telemetry_interval_s, settings.dcgm_url)
    streamer = Streamer(settings, clock, sender, expected.newest, stacks.request, devices)
    try:
        with _metrics(settings, streamer):
            streamer.run(closed)
    finally:
        if devices is not None:
            devices.close()
        stacks.close()
        sender.close(_FLUSH_S)
        expected.close()
        finder.close()


@contextmanager
def _metrics(settings: StreamerSettings, streamer: Streamer) -> Iterator[None]:
    """Serve the host's /metrics during the block; if that fails, log a warning and stream events anyway."""
    try:
        token = read_token(settings.metrics_token_file)
        registry = registry_of(HostCollector(streamer.reading))
        address, port = settings.metrics_address, settings.metrics_port
        server = MetricsServer(registry, address, port, token, key="diagnostics.metrics_port")
    except ConfigError as error:
        _logger.warning("/metrics of this host is not served: %s", error)
        yield
        return
    _logger.info("/metrics of this host at %s:%d", settings.metrics_address, server.port)
    try:
        yield
    finally:
        server.close()


if __name__ == "__main__":
    keep_own_log()
    sys.exit(main(sys.argv[1:]))
