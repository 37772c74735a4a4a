"""Records of a job in etcd and the run directory, for its metrics: health, rounds, incidents, verdicts, checkpoints."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.checkpoint_format.branches import list_branches
from megatrain.checkpoint_format.checkpoint_names import COMMIT_NAME, step_directory_name
from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.records.notices import ReceiverRecord
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_job.jobs.etcd_job import EtcdPoll
from megatrain_job.jobs.health import Health

_logger = logging.getLogger(__name__)
_PERIOD_S = 5.0


@dataclass(frozen=True, slots=True)
class JobRecords:
    """The job's records in etcd at the last poll."""

    health: Health | None = None
    """None: etcd has not answered yet."""
    rounds: int | None = None
    """Number of the newest round of this launch; None before the first round."""
    incidents: Mapping[str, int] = field(default_factory=dict)
    effective_time_ratio: float | None = None
    verdicts: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    receivers: tuple[ReceiverRecord, ...] = ()


def records_of(poll: EtcdPoll, now_s: float) -> JobRecords:
    """Return the records in a poll of etcd at a moment."""
    snapshot = poll.snapshot
    if snapshot is None:
        return JobRecords(health=poll.health(now_s))
    incidents = (*snapshot.earlier_incidents, *snapshot.incidents)
    ratios = [incident.effective_time_ratio for incident in incidents if incident.effective_time_ratio is not None]
    verdicts = [case.verdict for case in poll.records.cases if case.verdict is not None]
    return JobRecords(
        health=poll.health(now_s),
        rounds=max(snapshot.rounds, default=None),
        incidents=dict(Counter(str(incident.kind) for incident in incidents)),
        effective_time_ratio=ratios[-1] if ratios else None,
        verdicts=dict(
            Counter((str(verdict.kind), str(verdict.cause), str(verdict.confidence)) for verdict in verdicts)
        ),
        receivers=snapshot.receivers,
    )


class SaveFailures:
    """Counts the checkpoints that could not be stored, from the statuses that hosts write to etcd.

    A failed checkpoint is reported by every host that waits for it, so the count is the maximum over hosts.
    """

    def __init__(self) -> None:
        self._of_host: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return max(self._of_host.values(), default=0)

    def follow(self, before: EtcdPoll, now: EtcdPoll) -> None:
        """Count the failures between two polls. For one thread."""
        known = _failed_in_a_row(before)
        for host, number in _failed_in_a_row(now).items():
            earlier = known.get(host, 0)
            # a lower number means that a checkpoint was saved in the meantime: then all of these failures are new
            self._of_host[host] += number - earlier if number >= earlier else number


def _failed_in_a_row(poll: EtcdPoll) -> dict[str, int]:
    statuses = {} if poll.snapshot is None else poll.snapshot.statuses
    return {host: status.saves.num_failed for host, status in statuses.items() if status.saves is not None}


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The checkpoint that was committed last, of any branch."""

    step: int
    at_unix_s: float


class SavedCheckpointWatch:
    """Reads the newest checkpoint every few seconds until `close`; while storage fails, the last value stays."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._saved: SavedCheckpoint | None = None
        self._closed = threading.Event()
        self._thread = RestartingThread("checkpoints of the job", self._run, self._closed)

    @property
    def saved(self) -> SavedCheckpoint | None:
        return self._saved

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._saved = newest_checkpoint(self._checkpoints) or self._saved
            except (CheckpointError, OSError) as error:
                _logger.debug("the checkpoints cannot be read: %s", error)
            if self._closed.wait(_PERIOD_S):
                return


def newest_checkpoint(checkpoints: Path) -> SavedCheckpoint | None:
    """Return the last committed checkpoint; None if there is none. Raises: CheckpointError, OSError."""
    found: list[tuple[float, int]] = []
    for branch in list_branches(LocalLocation(checkpoints)):
        steps = committed_steps(LocalLocation(checkpoints / branch.name))
        if steps:
            commit = checkpoints / branch.name / step_directory_name(steps[-1]) / COMMIT_NAME
            found.append((commit.stat().st_mtime, steps[-1]))
    if not found:
        return None
    at_unix_s, step = max(found)
    return SavedCheckpoint(step, at_unix_s)
