"""The known facts about a broken round, and the driver's response to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.host_records import RankFailure
from megatrain.contracts.records.incident import IncidentKind
from megatrain_job.failures.gpu_faults import GpuFault

RESTART, EVICT, STOP, REQUEUE, HOLD = "restart", "evict", "stop", "requeue", "hold"
ROLLBACK = "rollback"
"""The action: restart from a checkpoint before the bad steps, and skip their batches."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The known facts about a broken round."""

    kind: IncidentKind
    round: int
    failures: tuple[RankFailure, ...]
    host_of: Mapping[int, str]
    """By rank."""
    lost: Mapping[str, str]
    """Hosts of the round that are gone, with the evidence."""
    suspects: tuple[str, ...]
    """Hosts to which victims lost the connection, or to which a hang's evidence points."""
    suspect_ranks: tuple[int, ...] = ()
    sign: str = ""
    """The strongest evidence of a hang, as a sentence."""
    last_step: int | None = None
    stop_reason: str = ""
    """The reason that a host reported for stopping its own workers."""
    fit: frozenset[str] = frozenset()
    """Hosts that may take part in the next round, before this response excludes any."""
    gpu_faults: Mapping[str, GpuFault] = field(default_factory=dict)
    """By host: the worst error of its GPUs during a hang."""


@dataclass(frozen=True, slots=True)
class Response:
    """The driver's response to a failure. `exit_code` is the job's if `action` is stop or requeue."""

    action: str
    reason: str
    label: str = ""
    culprit_hosts: tuple[str, ...] = ()
    culprit_ranks: tuple[int, ...] = ()
    cordoned: tuple[str, ...] = ()
    """The culprits that no round may use until a person removes their cordon."""
    checked: tuple[str, ...] = ()
    """The hosts that must pass their health checks before they take part again."""
    needs_pair_tests: bool = False
    """Whether all hosts run pair tests before the next round, because the culprit is unknown."""
    exit_code: int = 0
    kind: IncidentKind = IncidentKind.FAILURE
    rollback: tuple[int, int, int] | None = None
    """The step to roll back to, and the first and last step whose batches are skipped."""


def exit_code_of(failure: RankFailure) -> int:
    """Return the exit code of a job that stops because of this failure."""
    return failure.exit_code if failure.exit_code > 0 else int(ExitCode.FAILURE)
