"""Section [recovery]: how the launcher notices that something broke, and what it may do about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """How the launcher notices that something broke, and what it may do about it."""

    lease_ttl_s: int = field(
        default=10,
        metadata=option(
            "A host whose executor does not renew its lease for so long counts as lost. etcd grants no less than 2.",
            unit="s",
            minimum=2,
            maximum=600,
        ),
    )
    lease_renew_s: float = field(
        default=3.0,
        metadata=option(
            "How often an executor renews its lease; never later than a third of lease_ttl_s.",
            unit="s",
            above=0,
            maximum=200,
        ),
    )
    status_interval_s: float = field(
        default=5.0,
        metadata=option(
            "How often an executor writes its status while nothing happens; what happens is written at once.",
            unit="s",
            minimum=0.5,
            maximum=600,
        ),
    )
    hang_floor_s: float = field(
        default=5.0, metadata=option("A step that takes less than this never counts as a hang.", unit="s", above=0)
    )
    hang_factor: float = field(
        default=10.0, metadata=option("A step counts as hung after so many times the median step.", minimum=2)
    )
    restarts_per_hour: int = field(
        default=20, metadata=option("More restarts within an hour stop the job.", unit="restarts", minimum=0)
    )
    restarts_without_progress: int = field(
        default=3,
        metadata=option(
            "So many restarts in a row that complete no step beyond the last failure's stop the job. A failure of "
            "user code, data or memory that comes back at the same step stops it at the second.",
            unit="restarts",
            minimum=1,
        ),
    )
    network_failures: int = field(
        default=2, metadata=option("So many network failures of one host within the window evict it.", minimum=1)
    )
    network_window_s: float = field(
        default=300.0, metadata=option("Window in which a host's network failures are counted.", unit="s", above=0)
    )
    hangs_per_hour: int = field(
        default=2, metadata=option("So many hangs of one host within an hour evict it.", minimum=1)
    )
    host_failures_per_hour: int = field(
        default=3,
        metadata=option(
            "So many failures of one host within an hour evict it where the job can go on without it: its executor was "
            "lost, or a worker on it was the first to die and neither code nor data are to blame.",
            minimum=1,
        ),
    )
    stop_timeout_s: float = field(
        default=10.0,
        metadata=option(
            "A host that has not stopped a broken round's workers after so long is left out of the next round.",
            unit="s",
            above=0,
        ),
    )
    join_timeout_s: float = field(
        default=600.0,
        metadata=option(
            "How long a job waits for hosts that are missing before it goes on with fewer, or stops where it cannot.",
            unit="s",
            above=0,
        ),
    )
    max_vanished_fraction: float = field(
        default=0.3,
        metadata=option(
            "When a larger part of at least three hosts vanishes at once, that is taken for a failure of etcd or its "
            "network, and nobody is evicted before a second sign.",
            minimum=0,
            maximum=1,
        ),
    )
    has_health_checks: bool = field(default=True, metadata=option("Whether hosts are checked before they take part."))
    has_pair_checks: bool = field(
        default=True,
        metadata=option(
            "Whether hosts time an all-reduce with two neighbours before the first round, and after a failure that "
            "names no host. Needs has_health_checks, and seconds: torch is loaded for each turn."
        ),
    )
    min_free_disk_gb: float = field(
        default=5.0, metadata=option("Free space that the run directory's disk must have.", unit="GB", minimum=0)
    )
    max_clock_offset_s: float = field(
        default=2.0, metadata=option("How far a host's clock may be from etcd's.", unit="s", above=0)
    )
    max_slowdown: float = field(
        default=1.5,
        metadata=option(
            "A check that takes so many times this host's own median of before fails.", minimum=1, maximum=100
        ),
    )
