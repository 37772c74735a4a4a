"""Section [recovery]: how the launcher detects failures, and how it may react."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """How the launcher detects failures, and how it may react."""

    lease_ttl_s: int = option(
        10,
        "A host counts as lost if its executor has not renewed its lease for this long. etcd grants at least 2.",
        unit="s",
        minimum=2,
        maximum=600,
    )
    lease_renew_s: float = option(
        3.0,
        "Interval at which an executor renews its lease; at most a third of lease_ttl_s is used.",
        unit="s",
        above=0,
        maximum=200,
    )
    status_interval_s: float = option(
        5.0,
        "Interval at which an executor writes its status while nothing changes; changes are written at once.",
        unit="s",
        minimum=0.5,
        maximum=600,
    )
    hang_floor_s: float = option(5.0, "A step that takes less than this never counts as a hang.", unit="s", above=0)
    hang_factor: float = option(10.0, "A step counts as hung after this many times the median step time.", minimum=2)
    restarts_per_hour: int = option(
        20, "Largest number of restarts within an hour; one more stops the job.", unit="restarts", minimum=0
    )
    restarts_without_progress: int = option(
        3,
        "The job stops after this many restarts in a row without a completed step beyond that of the last failure. "
        "It stops at the second failure of user code, data or memory at the same step.",
        unit="restarts",
        minimum=1,
    )
    network_failures: int = option(
        2, "A host is evicted after this many network failures within network_window_s.", minimum=1
    )
    network_window_s: float = option(300.0, "Window in which a host's network failures are counted.", unit="s", above=0)
    hangs_per_hour: int = option(2, "A host is evicted after this many hangs within an hour.", minimum=1)
    host_failures_per_hour: int = option(
        3,
        "A host is evicted after this many failures within an hour if the job can continue without it. A failure "
        "counts if the host's executor was lost, or if a worker on it failed first and the cause is not code or data.",
        minimum=1,
    )
    stop_timeout_s: float = option(
        10.0,
        "A host that has not stopped the workers of a broken round within this time is left out of the next round.",
        unit="s",
        above=0,
    )
    join_timeout_s: float = option(
        600.0,
        "How long a job waits for missing hosts before it continues with fewer, or stops if it cannot.",
        unit="s",
        above=0,
    )
    max_vanished_fraction: float = option(
        0.3,
        "If more than this fraction of a round's hosts vanish at once, this counts as a failure of etcd or its "
        "network, and no host is evicted before there is further evidence. The rule needs a round of at least three "
        "hosts, of which at least two vanish.",
        minimum=0,
        maximum=1,
    )
    has_health_checks: bool = option(True, "Whether hosts are checked before they take part.")
    has_pair_checks: bool = option(
        True,
        "Whether hosts time an all-reduce with two neighbors before the first round, before a round with new hosts, "
        "and after a failure that names no host. Needs has_health_checks, and takes seconds, because torch is loaded "
        "for each pair test.",
    )
    pair_timeout_s: float = option(
        60.0,
        "How long the two hosts of a pair test may take to connect and time their all-reduce, after loading torch.",
        unit="s",
        above=0,
    )
    min_free_disk_gb: float = option(
        5.0, "Free space that the disk of the run directory must have.", unit="GB", minimum=0
    )
    max_clock_offset_s: float = option(2.0, "Largest offset of a host's clock from that of etcd.", unit="s", above=0)
    max_slowdown: float = option(
        1.5,
        "A check fails if it takes this many times the median of the same host's earlier checks.",
        minimum=1,
        maximum=100,
    )
