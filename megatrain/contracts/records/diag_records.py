"""The diagnosis's records in etcd: the addresses of its programs, their reports, and the settings of recording."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatrain.contracts.black_box.operations import Operation

SAMPLE_PERIOD = 10
"""The default of sample_period (ADR 0012)."""
_MAX_PERIOD = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DiagSettings:
    """What all ranks of a job record. `megatrain diag on|off|set` or the daemon writes it."""

    is_on: bool = True
    """False: no span is timed; progress is still recorded."""
    sample_period: int = SAMPLE_PERIOD
    """A step is streamed with all its spans when it is a multiple of this; of other steps only totals are streamed."""
    off_operations: tuple[str, ...] = ()
    """Operations that are not timed, by name."""
    full_until_unix_s: float = 0.0
    """Until this time, every step is streamed with all its spans: around incidents, or on demand."""
    by: str = ""
    reason: str = ""
    at_unix_s: float = 0.0

    def span_mask(self) -> int:
        """Return the mask of the control page: one bit per timed operation. Unknown names have no effect."""
        if not self.is_on:
            return 0
        off = {operation.number for operation in Operation if operation.value in self.off_operations}
        return (2**64 - 1) & ~sum(1 << number for number in off)

    def period_at(self, unix_s: float) -> int:
        """Return the sample period at a given time, limited to what a control page can hold."""
        return 1 if unix_s < self.full_until_unix_s else min(max(1, self.sample_period), _MAX_PERIOD)


@dataclass(frozen=True, slots=True)
class DaemonRecord:
    """The address of a job's diagnostics daemon. Leased: the key exists while the daemon lives."""

    host: str
    session: str
    """Each start of the daemon has a new one."""
    address: str
    port: int
    token: str
    """A program that can read this key may stream events. It proves this in a challenge; the token is never sent."""
    metrics_port: int = 0
    """Port of its own /metrics; 0: it has none."""
    started_unix_s: float = 0.0


class DeviceProblemKind(StrEnum):
    """Kinds of device problems, the worst first. The values equal those of the reasons in a job's health."""

    GPU_FAILING = "gpu-failing"
    """The GPU is lost, or its results cannot be trusted."""
    GPU_DEGRADED = "gpu-degraded"
    """The GPU is slowed down, or has more errors than others."""
    NETWORK_DEGRADED = "network-degraded"
    TELEMETRY_SILENT = "telemetry-silent"
    """Device problems of this host would not be recorded."""


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """A problem with a GPU, a link or a host's device driver: a sentence with figures."""

    kind: DeviceProblemKind
    host: str
    text: str
    since_unix_s: float | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DaemonReport:
    """The daemon's report about itself and the streams that it receives.

    It is valid while the DaemonRecord of this session exists. The daemon writes it on changes, and otherwise every few
    seconds: an old report means that the daemon hangs.
    """

    session: str
    at_unix_s: float
    problem: str = ""
    """Why no events can be stored; empty when they can."""
    newest_step_unix_s: float | None = None
    """Completion time of the newest step whose events arrived."""
    silent_ranks: str = ""
    """Ranks without any events in the newest steps, "0-3, 6"; shortened when there are many."""
    num_silent_ranks: int = 0
    away_hosts: tuple[str, ...] = ()
    """Some of the newest round's hosts that run a streamer but have no open stream."""
    num_away_hosts: int = 0
    devices: tuple[DeviceProblem, ...] = ()
    """The worst problems of GPUs and links, of hosts in any state."""
    num_device_problems: int = 0


@dataclass(frozen=True, slots=True)
class DashboardRecord:
    """The address of a job's web page. Leased: the key exists while the page is served."""

    url: str
    session: str
    """Each start of the server has a new one."""
    token_file: str = ""
    """File with the token that the page generated and requires; empty if it requires none or a configured one."""
    host: str = ""
    """The machine that serves the page: only this machine can reach a page on loopback."""
