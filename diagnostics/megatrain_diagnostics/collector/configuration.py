"""The configuration of a daemon: section [diagnostics] from the launch or the job's record, and its addresses."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.config.serialize import config_of_values
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.records.rounds import JobRecord
from megatrain.run_files.run_directory import RunDirectory
from megatrain_diagnostics.collector.settings import DaemonSettings
from megatrain_diagnostics.store.retention import Retention
from megatrain_job.coordination.settings import EtcdSettings

_logger = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.25
_EVERYTHING = Retention(hours=1e6, num_bytes=1e18)


class Configuration:
    """Section [diagnostics] and the checkpoint directory: first from the launch, later from the job's record."""

    def __init__(self, settings: DaemonSettings) -> None:
        self._section = settings.section or DiagnosticsConfig()
        self._run = RunDirectory(settings.run)
        self._checkpoints = settings.checkpoints
        self._known = threading.Event()
        if settings.section is not None:
            self._known.set()

    @property
    def section(self) -> DiagnosticsConfig:
        """The section; the default values until it is known."""
        return self._section

    @property
    def checkpoints(self) -> Path:
        return self._checkpoints or self._run.checkpoints

    @property
    def retention(self) -> Retention:
        """The retention limits; unlimited until the configuration is known."""
        if not self._known.is_set():
            return _EVERYTHING
        return Retention(self._section.retention_hours, self._section.retention_gb * 1e9)

    def take(self, record: JobRecord) -> None:
        """Take the section from a record; an unreadable record changes nothing."""
        try:
            # the record of a job that torchrun started has no configuration
            config = config_of_values(record.config, record.job) if record.config else None
            self._section = config.diagnostics if config else DiagnosticsConfig()
            if config and config.checkpoint.directory:
                self._checkpoints = Path(config.checkpoint.directory)
            self._known.set()
        except ConfigError as error:
            _logger.warning("the configuration in the job's record cannot be read; the old one stays in use: %s", error)

    def wait(self, stop: threading.Event) -> bool:
        """Wait until the section is known, or `stop` is set; return whether it is known."""
        if not self._known.is_set():
            _logger.info("waiting for the job's record, which sets the address to listen at; no port is open yet")
        while not self._known.wait(_LOOK_S):
            if stop.is_set():
                return False
        return True


def usual_address(etcd: EtcdSettings) -> str:
    """Return loopback if all etcd endpoints are on this machine, else this machine's address in etcd's network.

    Raises: ConfigError when there is no route to etcd.
    """
    is_alone = all(endpoint.is_local for endpoint in etcd.endpoints)
    return _LOOPBACK if is_alone else _address_towards(etcd)


def reachable_address(settings: DaemonSettings, address: str) -> str:
    """Return the address by which other hosts reach a socket that listens at `address`.

    Raises: ConfigError when `address` means all addresses, and there is no route to etcd.
    """
    if address in ("0.0.0.0", "::"):
        return _address_towards(settings.etcd)
    return address


def _address_towards(etcd: EtcdSettings) -> str:
    """Return the source address of connections to etcd, without sending anything. Raises: ConfigError."""
    endpoint = etcd.endpoints[0]
    if endpoint.path:
        return _LOOPBACK
    try:
        family, kind, _, _, target = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            [f"no route from this machine to etcd at {endpoint}: {error}; set diagnostics.daemon_address"]
        ) from error
