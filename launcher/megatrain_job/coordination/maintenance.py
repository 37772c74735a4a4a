"""The health of etcd itself: a member's status, alarms, and compaction of the history.

Status values at 250 a second are 9 GB of history a day, and at its quota (2 GB by default) etcd refuses writes. Either
etcd compacts itself (`--auto-compaction-retention`) or the driver's `HistoryTrimmer` does it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.errors import CompactedError
from megatrain_job.coordination.gateway_response import JsonObject
from megatrain_job.coordination.json_fields import header_revision, int_field, list_field
from megatrain_job.coordination.settings import Endpoint
from megatrain_job.coordination.wire import KeyRange, Range


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member. `leader_id`: 0 if it knows no leader; `database_bytes`: the file's size."""

    leader_id: int
    database_bytes: int


@dataclass(frozen=True, slots=True)
class EtcdAlarm:
    """NOSPACE or CORRUPT, of one member."""

    name: str
    member_id: int


def status(client: EtcdClient, endpoint: Endpoint) -> MemberStatus:
    """Return the status of one member. Raises: CoordinationError."""
    return client.gateway.call_at(endpoint, "/v3/maintenance/status", {}, _read_status, what="etcd status")


def alarms(client: EtcdClient) -> tuple[EtcdAlarm, ...]:
    """Return etcd's alarms. Raises: CoordinationError."""
    return client.gateway.call("/v3/maintenance/alarm", {"action": "GET"}, _read_alarms, what="etcd alarms")


def compact(client: EtcdClient, revision: int) -> None:
    """Drop the history before `revision`; the state stays. Does nothing if it was dropped before.

    Raises: CoordinationError, also for a revision that does not exist yet.
    """
    try:
        client.gateway.call(
            "/v3/kv/compaction", {"revision": str(revision)}, bool, what=f"etcd compaction to revision {revision}"
        )
    except CompactedError:
        return


class HistoryTrimmer:
    """Keeps about `retention_s` of history: `tick` compacts to the newest of the revisions that it recorded at least
    that long ago.
    """

    def __init__(self, client: EtcdClient, *, retention_s: float = 600.0, period_s: float = 60.0) -> None:
        self._client = client
        self._retention_s = retention_s
        self._period_s = period_s
        self._seen: deque[tuple[float, int]] = deque()

    def tick(self, now_s: float) -> int | None:
        """Record the current revision, at most once a period, and compact; return the revision compacted to, if any.

        Raises: CoordinationError: call it again later.
        """
        if self._seen and now_s - self._seen[-1][0] < self._period_s:
            return None
        response = self._client.read(Range(KeyRange.key(b"\0"), limit=1, has_values=False))
        self._seen.append((now_s, response.revision))
        due: int | None = None
        while self._seen[0][0] <= now_s - self._retention_s:
            due = self._seen.popleft()[1]
        if due is not None:
            compact(self._client, due)
        return due


def _read_status(response: JsonObject) -> MemberStatus:
    header_revision(response)  # raises where there is no header
    return MemberStatus(leader_id=int_field(response, "leader"), database_bytes=int_field(response, "dbSize"))


def _read_alarms(response: JsonObject) -> tuple[EtcdAlarm, ...]:
    return tuple(
        EtcdAlarm(str(raw.get("alarm", "NONE")), int_field(raw, "memberID")) for raw in list_field(response, "alarms")
    )
