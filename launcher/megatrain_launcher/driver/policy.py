"""The limits that the driver applies: those of [recovery] and [diagnostics], and the possible numbers of hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, Self

from megatrain.config.config import Config
from megatrain.config.recovery import RecoveryConfig
from megatrain.fencing.fence import FenceRule

WAIT_FOR_MORE_S = 2.0
"""When enough hosts have joined (the minimum, or as many as keep the step time), a round waits this long for more."""
EVIDENCE_S = 1.0
"""Time limit for the hosts of a stuck round to report the positions of their ranks."""
PROBE_AGAIN_S = 0.5
HANG_GRACE_S = 2.0
"""After a lease's TTL plus this time, the driver halts a stalled round even if the suspects are unreachable."""
GROW_AFTER_S = 10.0
"""The time for which a host must be registered before the driver ends a running round to include it."""
CHECK_TIMEOUT_S = 320.0
"""Time limit for the health checks of a suspect host; the timed checks alone may take 300 s."""
PAIR_START_S = 90.0
"""Time beyond `pair_timeout_s` for a turn of pair tests: to receive the command, load torch, and send the report."""
REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(RecoveryConfig):
    """The driver's limits: those of [recovery], and others.

    `feasible_counts`: numbers of hosts, min_hosts to max_hosts, for which a layout exists, each with its slots: the
    micro-batches that the fullest pipeline computes one after another in a step (ADR 0075), as the mean over the steps
    of the run if its stages have several batch sizes (ADR 0077).
    """

    min_hosts: int
    max_hosts: int
    num_workers: int
    feasible_counts: Mapping[int, float]
    save_grace_s: float = 60.0
    shrink_after_s: float = 600.0
    """The time to wait for a missing host after a round broke, before the job continues with fewer hosts and slower."""
    has_pair_checks: bool = False
    """Whether hosts run timed all-reduces in pairs: before the first round, before a round that grows by a new host,
    and after a failure that names no host."""
    train_steps: int = 1_000_000
    max_skipped_steps: int = 5
    eviction: Literal["automatic", "approval", "dry-run"] = "automatic"
    """The driver's response to a verdict of the diagnosis: it acts, waits for approval, or only records it."""
    evictions_per_hour: int = 2
    restart_cost_s: float = 60.0
    max_rollbacks: int = 2

    def __post_init__(self) -> None:
        wrong = sorted(count for count in self.feasible_counts if not self.min_hosts <= count <= self.max_hosts)
        if not self.feasible_counts or wrong:
            raise ValueError(
                f"feasible_counts={wrong or 'empty'}; expected within {self.min_hosts} to {self.max_hosts}"
            )

    @classmethod
    def of(
        cls, config: Config, *, min_hosts: int, max_hosts: int, num_workers: int, feasible_counts: Mapping[int, float]
    ) -> Self:
        """Take the limits from a job's configuration."""
        recovery, diagnostics = config.recovery, config.diagnostics
        limits = asdict(recovery) | {"has_pair_checks": recovery.has_health_checks and recovery.has_pair_checks}
        return cls(
            **limits,
            min_hosts=min_hosts,
            max_hosts=max_hosts,
            num_workers=num_workers,
            feasible_counts=feasible_counts,
            save_grace_s=config.runtime.save_grace_s,
            shrink_after_s=recovery.join_timeout_s,
            train_steps=config.train.steps,
            max_skipped_steps=config.train.max_skipped_steps,
            eviction=diagnostics.eviction,
            evictions_per_hour=diagnostics.evictions_per_hour,
            restart_cost_s=diagnostics.restart_cost_s,
            max_rollbacks=diagnostics.max_rollbacks,
        )

    @property
    def fence_rule(self) -> FenceRule:
        """The rule for how long workers may outlive their host's lease. Hosts enforce it; the driver waits for it."""
        return FenceRule(
            lease_ttl_s=self.lease_ttl_s,
            floor_s=self.hang_floor_s,
            join_timeout_s=self.join_timeout_s,
            save_grace_s=self.save_grace_s,
        )

    def best_count(self, num_hosts: int) -> int:
        """Return the largest possible number of hosts up to `num_hosts`; 0 if there is none."""
        return max((count for count in self.feasible_counts if count <= num_hosts), default=0)

    def slots(self, num_hosts: int) -> float:
        """Return the slots of a step on the largest possible number of hosts up to `num_hosts`; infinite without one.

        The compute time of a step is proportional to them.
        """
        return self.feasible_counts.get(self.best_count(num_hosts), math.inf)

    def fewest_as_fast(self, num_hosts: int) -> int:
        """Return the smallest possible number of hosts that has no more slots than `num_hosts` hosts."""
        most = self.slots(num_hosts)
        return min(count for count, slots in self.feasible_counts.items() if slots <= most)
