"""The settings of an executor."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.config.config import Config
from megatrain.config.serialize import config_hash
from megatrain.run_files.run_directory import RunDirectory
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.health.context import Places
from megatrain_launcher.logs.tee import TeeChoice


def new_session() -> str:
    """Return an id that distinguishes one session of an executor from all others."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """The settings of an executor. `host`: its host's name; `address`: the host's address for other hosts."""

    config: Config
    etcd: EtcdSettings
    host: str
    address: str
    num_workers: int
    min_hosts: int
    max_hosts: int
    feasible_hosts: Mapping[int, float]
    """Numbers of hosts, from min_hosts to max_hosts, that can train, each with the mean slots of a step."""
    launch_id: str = ""
    """The same on all hosts of one launch; empty: the first host chooses one."""
    module: str = "megatrain.train"
    arguments: Sequence[str] = ()
    """Arguments of the workers' module."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    preload: Sequence[str] = ("megatrain.training.worker",)
    """Modules that the standby server imports before workers are forked."""
    labels: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""
    tee: TeeChoice = "first"
    """The ranks whose output the executor also prints: none, first (rank 0 of the job), or all."""
    places: Places = field(default_factory=Places)
    """The paths of the state of this host's system."""
    log_directory: Path | None = None
    is_driver_candidate: bool = True
    is_daemon_candidate: bool = True
    """Whether the job's daemon and page may run on this host."""

    @property
    def run_directory(self) -> RunDirectory:
        return RunDirectory(Path(self.config.job.resolved_run_directory))

    @property
    def logs(self) -> Path:
        return self.log_directory or self.run_directory.logs

    @property
    def config_hash(self) -> str:
        return config_hash(self.config)
