"""Section [diagnostics]: what is streamed to the diagnostics daemon, how it judges, and what may follow from that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosticsConfig:
    """What is streamed to the diagnostics daemon, how it judges, and what may follow from that."""

    is_streamed: bool = field(
        default=True,
        metadata=option(
            "Whether hosts stream events, logs and stacks. Without the extra `diagnostics` nothing is streamed."
        ),
    )
    sample_period: int = field(
        default=10,
        metadata=option(
            "Of so many steps one is streamed with all its spans; of the others only sums.",
            unit="steps",
            minimum=1,
            maximum=2**31 - 1,
        ),
    )
    spool_mb: int = field(
        default=256,
        metadata=option(
            "Room on a host's disk for what the daemon could not yet be given; beyond it the oldest is dropped and "
            "counted.",
            unit="MB",
            minimum=1,
        ),
    )
    daemon_host: str = field(
        default="",
        metadata=option(
            "Host, by its --host-id, on which daemon and web page run. Empty: the one whose driver is elected."
        ),
    )
    daemon_address: str = field(
        default="",
        metadata=option("Address that the daemon listens at. Empty: 127.0.0.1 for a job on one machine, else its own."),
    )
    daemon_port: int = field(
        default=0, metadata=option("Port of the daemon; 0: any that is free.", minimum=0, maximum=65535)
    )
    metrics_port: int = field(
        default=0,
        metadata=option("Port of a host's /metrics; 0: any that is free, shown in the log.", minimum=0, maximum=65535),
    )
    daemon_metrics_port: int = field(
        default=0,
        metadata=option("Port of the daemon's /metrics; 0: any that is free, shown in etcd.", minimum=0, maximum=65535),
    )
    metrics_address: str = field(
        default="127.0.0.1",
        metadata=option(
            "Address of /metrics, of hosts and of the daemon. Beyond the own machine a metrics_token_file is needed."
        ),
    )
    metrics_token_file: str = field(
        default="", metadata=option("File with the bearer token that a scraper must send. Empty: none is asked for.")
    )
    telemetry_interval_s: float = field(
        default=10.0,
        metadata=option(
            "Hosts look at their GPUs and network interfaces so often; 0: never.", unit="s", minimum=0, maximum=3600
        ),
    )
    dcgm_url: str = field(
        default="",
        metadata=option(
            "Page of NVIDIA's DCGM exporter on each host, as http://localhost:9400/metrics: GPUs are read from it. "
            "Empty: the driver is asked by NVML.",
            pattern=r"(http://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?)?",
        ),
    )
    retention_hours: float = field(
        default=168.0, metadata=option("Events older than this are removed.", unit="h", above=0)
    )
    retention_gb: float = field(
        default=50.0, metadata=option("The oldest events are removed beyond this.", unit="GB", above=0)
    )
    straggler_excess: float = field(
        default=0.1,
        metadata=option("A rank that is slower than its peers by less than this fraction is not a straggler.", above=0),
    )
    straggler_score: float = field(
        default=3.5, metadata=option("Least robust z-score, median and MAD of the peers, of a straggler.", above=0)
    )
    straggler_steps: int = field(
        default=8, metadata=option("It must last so many steps.", unit="steps", minimum=2, maximum=1024)
    )
    eviction: Literal["automatic", "approval", "dry-run"] = field(
        default="automatic",
        metadata=option(
            "What follows from a verdict: the driver acts; it waits for `megatrain job approve`; it only records what "
            "it would have done."
        ),
    )
    evictions_per_hour: int = field(
        default=2, metadata=option("Verdicts evict no more hosts within an hour than this.", minimum=0)
    )
    restart_price_s: float = field(
        default=60.0,
        metadata=option(
            "Price of a restart until the job has seen one: a host is evicted for its slowness only where the rest of "
            "the job gains more.",
            unit="s",
            minimum=0,
        ),
    )
    loss_jump_factor: float = field(
        default=5.0,
        metadata=option(
            "A loss or gradient norm so many times the median of the steps before, or one that is no number, is an "
            "alarm; 0: never.",
            minimum=0,
        ),
    )
    max_rollbacks: int = field(
        default=2,
        metadata=option(
            "So often an hour the job goes back to before an alarm and leaves out its batches; 0: never.",
            minimum=0,
        ),
    )
