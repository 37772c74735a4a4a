"""Section [diagnostics]: what hosts stream to the diagnostics daemon, its thresholds, and the actions it may cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosticsConfig:
    """What hosts stream to the diagnostics daemon, its thresholds, and the actions it may cause."""

    is_streamed: bool = option(
        True, "Whether hosts stream events, logs and stacks. Without the extra `diagnostics` nothing is streamed."
    )
    sample_period: int = option(
        10,
        "Every sample_period-th step is streamed with all its spans; for the other steps, only totals.",
        unit="steps",
        minimum=1,
        maximum=2**31 - 1,
    )
    spool_mb: int = option(
        256,
        "Disk space on a host for data that the daemon has not received yet; beyond it the oldest data are dropped "
        "and counted.",
        unit="MB",
        minimum=1,
    )
    daemon_host: str = option(
        "", "Host, by its --host-id, on which the daemon and the dashboard run. Empty: the host of the elected driver."
    )
    daemon_address: str = option(
        "",
        "Address that the daemon listens at. Empty: 127.0.0.1 if etcd runs only on the daemon's host, else the address "
        "of this host in etcd's network.",
    )
    daemon_port: int = option(0, "Port of the daemon; 0: any free port.", minimum=0, maximum=65535)
    metrics_port: int = option(
        0, "Port of a host's /metrics; 0: any free port, shown in the log.", minimum=0, maximum=65535
    )
    daemon_metrics_port: int = option(
        0, "Port of the daemon's /metrics; 0: any free port, shown in etcd.", minimum=0, maximum=65535
    )
    metrics_address: str = option(
        "127.0.0.1",
        "Address at which hosts and the daemon serve /metrics. An address that other machines can reach needs "
        "metrics_token_file.",
    )
    metrics_token_file: str = option(
        "", "File with the bearer token that a scraper must send. Empty: no token is needed."
    )
    telemetry_interval_s: float = option(
        10.0,
        "Interval at which hosts read the state of their GPUs and network interfaces; 0: never.",
        unit="s",
        minimum=0,
        maximum=3600,
    )
    dcgm_url: str = option(
        "",
        "URL of NVIDIA's DCGM exporter on each host, such as http://localhost:9400/metrics, for readings of GPUs. "
        "Empty: readings come from the driver, by NVML.",
        pattern=r"(http://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?)?",
    )
    retention_hours: float = option(168.0, "Events older than this are removed.", unit="h", above=0)
    retention_gb: float = option(
        50.0, "Limit of the stored events; beyond it the oldest are removed.", unit="GB", above=0
    )
    straggler_excess: float = option(
        0.1, "A rank that is slower than its peers by less than this fraction is not a straggler.", above=0
    )
    straggler_score: float = option(
        3.5, "Lowest robust z-score of a straggler, from the median and the MAD of its peers.", above=0
    )
    straggler_steps: int = option(
        8, "Number of steps for which a straggler must be slow.", unit="steps", minimum=2, maximum=1024
    )
    eviction: Literal["automatic", "approval", "dry-run"] = option(
        "automatic",
        "What follows from a verdict. automatic: the driver acts. approval: the driver waits for `megatrain job "
        "approve`. dry-run: the driver only records what it would have done.",
    )
    evictions_per_hour: int = option(2, "Largest number of hosts that verdicts evict within an hour.", minimum=0)
    restart_cost_s: float = option(
        60.0,
        "Assumed cost of a restart until the job has measured one. A slow host is evicted only if the rest of the "
        "job saves more time than a restart costs.",
        unit="s",
        minimum=0,
    )
    loss_jump_factor: float = option(
        5.0,
        "A loss or gradient norm raises an alarm if it exceeds this multiple of the median of the previous steps, "
        "or is not finite; 0: never.",
        minimum=0,
    )
    max_rollbacks: int = option(
        2,
        "How often within an hour the job may return to a step before an alarm and skip the batches that caused "
        "it; 0: never.",
        minimum=0,
    )
