"""The input and output of a host's checks: the facts about the machine, which tests can replace, and the findings.

A finding becomes a line of the report. It also has the values that are kept in the host's history.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.config.config import Config
from megatrain.config.recovery import RecoveryConfig
from megatrain.contracts.black_box.encoding import box_bytes
from megatrain.contracts.records.host_records import CheckOutcome
from megatrain.run_files.run_directory import safe_name
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.health.child import ProbeRunner, run_probe


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of the system's state."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    kernel_log: Path = Path("/dev/kmsg")


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthContext:
    """The inputs of the checks of one host."""

    host: str
    session: str
    run_directory: Path
    num_workers: int
    history: Path
    """The file with this host's earlier measurements."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    device: str = "auto"
    """As runtime.device: auto, cpu or cuda."""
    network_interface: str = ""
    shared_memory: Path | None = None
    """The directory of black boxes; None if black boxes are off."""
    shared_memory_bytes: int = 0
    """The total size of this host's black boxes in `shared_memory`."""
    etcd: EtcdSettings | None = None
    """The etcd cluster. This host's clock is compared with the clocks of its members."""
    is_training: bool = False
    """Whether workers are running. Then nothing is timed, because checks and workers would slow each other down."""
    places: Places = field(default_factory=Places)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    probe: ProbeRunner = run_probe
    """Runs the programs that load torch or the GPU's driver."""


def context_of(
    config: Config,
    *,
    host: str,
    session: str,
    run_directory: Path,
    num_workers: int,
    etcd: EtcdSettings | None,
    is_training: bool = False,
    places: Places,
) -> HealthContext:
    """Return the context of a host that runs `num_workers` workers with this configuration."""
    telemetry = config.telemetry
    shared_memory = Path(telemetry.black_box_directory) if telemetry.black_box_directory else None
    return HealthContext(
        host=host,
        session=session,
        run_directory=run_directory,
        num_workers=num_workers,
        history=history_path(run_directory, host),
        recovery=config.recovery,
        device=config.runtime.device,
        network_interface=config.runtime.network_interface,
        shared_memory=shared_memory,
        shared_memory_bytes=num_workers * box_bytes(telemetry.black_box_records) if shared_memory else 0,
        etcd=etcd,
        is_training=is_training,
        places=places,
    )


def history_path(run_directory: Path, host: str) -> Path:
    """Return the file with a run's measurements of a host."""
    return run_directory / "hosts" / safe_name(host) / "health.json"


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One finding. `value` with `unit` is the measurement, if there is one."""

    name: str
    outcome: CheckOutcome
    detail: str
    value: float | None = None
    unit: str = ""
    samples: Mapping[str, float] = field(default_factory=dict)
    """Measurements for the history, which keeps the last MAX_SAMPLES of each; only those of passed checks are kept."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """Facts for the history, which keeps the last value of each, such as the number of GPUs or the speed of a link."""


def passed(name: str, detail: str) -> HealthFinding:
    return HealthFinding(name, CheckOutcome.PASSED, detail)


def warning(name: str, detail: str) -> HealthFinding:
    return HealthFinding(name, CheckOutcome.WARNING, detail)


def failed(name: str, detail: str) -> HealthFinding:
    return HealthFinding(name, CheckOutcome.FAILED, detail)


def skipped(name: str, detail: str) -> HealthFinding:
    return HealthFinding(name, CheckOutcome.SKIPPED, detail)
