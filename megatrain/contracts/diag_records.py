"""What the diagnosis says through etcd: who listens, and what ranks shall record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatrain.contracts.operations import Operation

SAMPLE_PERIOD = 10
"""Of so many steps one is streamed with all its spans, unless somebody says otherwise (DESIGN decision 15)."""
_MAX_PERIOD = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DiagSettings:
    """What ranks record, for all of a job. Written by whoever uses `megatrain diag on|off|set`, or by the daemon."""

    is_on: bool = True
    """False: no span is timed; progress is still seen."""
    sample_period: int = SAMPLE_PERIOD
    """A step is streamed with all its spans when it is a multiple of this, else only its sums."""
    off_operations: tuple[str, ...] = ()
    """Operations that are not timed, by name."""
    full_until_unix_s: float = 0.0
    """Until then every step is streamed with all its spans: around incidents, or on demand."""
    by: str = ""
    reason: str = ""
    at_unix_s: float = 0.0

    def span_mask(self) -> int:
        """Return the mask of the control page: a bit for each operation that is timed. Names not known say nothing."""
        if not self.is_on:
            return 0
        off = {operation.number for operation in Operation if operation.value in self.off_operations}
        return (2**64 - 1) & ~sum(1 << number for number in off)

    def period_at(self, unix_s: float) -> int:
        """Return the sample period that holds at a moment, as a control page can say it."""
        return 1 if unix_s < self.full_until_unix_s else min(max(1, self.sample_period), _MAX_PERIOD)


@dataclass(frozen=True, slots=True)
class DaemonRecord:
    """Where the diagnostics daemon of a job listens. Leased: it is there while the daemon lives."""

    host: str
    session: str
    """New with every life of the daemon."""
    address: str
    port: int
    token: str
    """Whoever may read this key may stream events: proved by a challenge, never sent."""
    metrics_port: int = 0
    """Of its own /metrics; 0: it has none."""
    started_unix_s: float = 0.0
    version: str = ""


class DeviceTroubleKind(StrEnum):
    """What is wrong with a device, the worst first; values are those of the reasons of a job's health."""

    GPU_FAILING = "gpu-failing"
    """It is lost, or what it computes is not to be trusted."""
    GPU_DEGRADED = "gpu-degraded"
    """It is slowed down, or has more errors than others."""
    NETWORK_DEGRADED = "network-degraded"
    TELEMETRY_SILENT = "telemetry-silent"
    """None of that would be recorded."""


@dataclass(frozen=True, slots=True)
class DeviceTrouble:
    """What is wrong with a GPU, a link or the driver of a host: a sentence with figures."""

    kind: DeviceTroubleKind
    host: str
    text: str
    since_unix_s: float | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DaemonReport:
    """What the daemon reports about itself and the streams that it receives. It counts while the daemon of this session
    is announced.

    Written when something is new, and every few seconds in any case: an old one is of a daemon that hangs.
    """

    session: str
    at_unix_s: float
    trouble: str = ""
    """Why nothing can be stored; empty when all is well."""
    heard_unix_s: float | None = None
    """When the newest step was completed of which events came."""
    silent_ranks: str = ""
    """In the newest steps nothing came of these, "0-3, 6"; cut where they are many."""
    num_silent_ranks: int = 0
    away_hosts: tuple[str, ...] = ()
    """Hosts of the newest round that run a streamer and have no stream open: a few of them."""
    num_away_hosts: int = 0
    devices: tuple[DeviceTrouble, ...] = ()
    """The worst of what is wrong with GPUs and links, of hosts in whatever state."""
    num_device_troubles: int = 0


@dataclass(frozen=True, slots=True)
class DashboardRecord:
    """Where the web page of a job is. Leased: it is there while the page is served."""

    url: str
    session: str
    """New with every life of the server."""
    started_unix_s: float = 0.0
    version: str = ""
    token_file: str = ""
    """Of the token that the page made for itself and asks for; empty where it asks for none, or was given one."""
    host: str = ""
    """The machine that serves it: only that machine reaches a page on loopback."""
