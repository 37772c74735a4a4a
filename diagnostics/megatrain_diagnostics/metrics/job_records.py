"""What etcd and the run directory say of a job, for its metrics: rounds, incidents, verdicts, checkpoints.

Looked at every few seconds in a thread of its own. What is out of reach keeps its last value.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatrain.contracts.checkpoint_files import COMMIT_NAME, committed_steps, step_directory_name
from megatrain.contracts.errors import CheckpointError, CoordinationError
from megatrain.contracts.host_verdict import HostVerdict
from megatrain.contracts.incident import Incident
from megatrain.contracts.job_keys import JobKeys, key_number
from megatrain.contracts.lineage import list_branches
from megatrain.contracts.location import LocalLocation
from megatrain.contracts.record import RecordType, decode
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.lasting_thread import LastingThread
from megatrain.coordination.wire import KeyRange, Range

_logger = logging.getLogger(__name__)
_PERIOD_S = 5.0


@dataclass(frozen=True, slots=True)
class JobRecords:
    """What was there at the last look."""

    rounds: int = 0
    incidents: Mapping[str, int] = field(default_factory=dict)
    effective_time_ratio: float | None = None
    verdicts: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    saved_step: int | None = None
    saved_unix_s: float | None = None


class JobRecordsWatch:
    """Looks until `close`."""

    def __init__(self, client: EtcdClient, keys: JobKeys, checkpoints: Path, *, period_s: float = _PERIOD_S) -> None:
        self._client, self._keys, self._checkpoints, self._period_s = client, keys, checkpoints, period_s
        self._records = JobRecords()
        self._closed = threading.Event()
        self._thread = LastingThread("records of the job", self._run, self._closed)

    @property
    def records(self) -> JobRecords:
        return self._records

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._records = read_records(self._client, self._keys, self._records)
            except CoordinationError as error:
                _logger.debug("records of the job are out of reach: %s", error)
            try:
                self._records = read_checkpoints(self._checkpoints, self._records)
            except (CheckpointError, OSError) as error:
                _logger.debug("checkpoints cannot be looked at: %s", error)
            if self._closed.wait(self._period_s):
                return


def read_records(client: EtcdClient, keys: JobKeys, before: JobRecords) -> JobRecords:
    """Return what etcd holds. Raises: CoordinationError."""
    newest = client.read(
        Range(KeyRange.prefix(keys.directory("rounds")), limit=1, is_newest_first=True, has_values=False)
    ).items
    number = key_number(keys.parts(newest[0].key.decode(errors="replace"))[-1]) if newest else None
    incidents = _decoded(client, keys.directory("incidents"), Incident)
    verdicts = _decoded(client, keys.directory("verdicts"), HostVerdict)
    ratios = [one.effective_time_ratio for one in incidents if one.effective_time_ratio is not None]
    return replace(
        before,
        rounds=number or 0,
        incidents=dict(Counter(str(one.kind) for one in incidents)),
        effective_time_ratio=ratios[-1] if ratios else None,
        verdicts=dict(Counter((str(one.kind), str(one.cause), str(one.confidence)) for one in verdicts)),
    )


def read_checkpoints(checkpoints: Path, before: JobRecords) -> JobRecords:
    """Return what storage holds: the checkpoint that was committed last, of whatever branch.

    Raises: CheckpointError, OSError.
    """
    newest: tuple[float, int] | None = None
    for branch in list_branches(LocalLocation(checkpoints)):
        steps = committed_steps(LocalLocation(checkpoints / branch.name))
        if steps:
            commit = checkpoints / branch.name / step_directory_name(steps[-1]) / COMMIT_NAME
            found = (commit.stat().st_mtime, steps[-1])
            newest = found if newest is None else max(newest, found)
    if newest is None:
        return before
    return replace(before, saved_unix_s=newest[0], saved_step=newest[1])


def _decoded(client: EtcdClient, directory: str, kind: type[RecordType]) -> list[RecordType]:
    found = []
    for item in client.read_all(KeyRange.prefix(directory)).items:
        try:
            found.append(decode(kind, item.value, item.key.decode(errors="replace")))
        except CoordinationError:
            continue  # whoever writes these tells of what is damaged
    return found
