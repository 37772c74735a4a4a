"""The health of etcd itself: its members, size and alarms, and a history that does not grow for ever.

250 status values a second are 9 GB of history a day, and at its quota (2 GB unless set) etcd takes no writes. Either it
compacts itself (`--auto-compaction-retention`) or the driver lets `HistoryTrimmer` do it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from megatrain.contracts.errors import CoordinationError
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.errors import CompactedError
from megatrain.coordination.gateway_answer import JsonObject, MalformedError
from megatrain.coordination.settings import Endpoint
from megatrain.coordination.wire import KeyRange, Range, header_revision, int_field, list_field

_DEFRAGMENT_S = 60.0


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member. `database_bytes` is the file, `used_bytes` what a defragmentation would leave of it."""

    member_id: int
    version: str
    revision: int
    leader_id: int
    database_bytes: int
    used_bytes: int
    errors: tuple[str, ...]

    @property
    def is_leader(self) -> bool:
        return self.member_id == self.leader_id


@dataclass(frozen=True, slots=True)
class Alarm:
    """NOSPACE or CORRUPT, of one member."""

    name: str
    member_id: int


@dataclass(frozen=True, slots=True)
class Member:
    """One member as the cluster knows it."""

    member_id: int
    name: str
    client_urls: tuple[str, ...]


def statuses(client: EtcdClient) -> dict[Endpoint, MemberStatus | CoordinationError]:
    """Ask every endpoint of the client, one after the other; an endpoint that does not answer has its error."""
    found: dict[Endpoint, MemberStatus | CoordinationError] = {}
    for endpoint in client.settings.endpoints:
        try:
            found[endpoint] = status(client, endpoint)
        except CoordinationError as error:
            found[endpoint] = error
    return found


def status(client: EtcdClient, endpoint: Endpoint) -> MemberStatus:
    """Ask one member. Raises: CoordinationError."""
    return client.gateway.call_at(endpoint, "/v3/maintenance/status", {}, _read_status, what="etcd status")


def members(client: EtcdClient) -> tuple[Member, ...]:
    """Return the members of the cluster. Raises: CoordinationError."""
    return client.gateway.call("/v3/cluster/member/list", {}, _read_members, what="etcd member list")


def alarms(client: EtcdClient) -> tuple[Alarm, ...]:
    """Return what etcd complains of. Raises: CoordinationError."""
    return client.gateway.call("/v3/maintenance/alarm", {"action": "GET"}, _read_alarms, what="etcd alarms")


def disarm(client: EtcdClient, alarm: Alarm) -> None:
    """Take back an alarm whose cause is mended. Raises: CoordinationError."""
    body = {"action": "DEACTIVATE", "memberID": str(alarm.member_id), "alarm": alarm.name}
    client.gateway.call("/v3/maintenance/alarm", body, _read_alarms, what=f"etcd disarming of {alarm.name}")


def compact(client: EtcdClient, revision: int) -> None:
    """Drop the history before `revision`; the state stays. Nothing happens when that was done before.

    Raises: CoordinationError, also for a revision that is not there yet.
    """
    try:
        client.gateway.call(
            "/v3/kv/compaction", {"revision": str(revision)}, bool, what=f"etcd compaction to revision {revision}"
        )
    except CompactedError:
        return


def defragment(client: EtcdClient, endpoint: Endpoint) -> None:
    """Give the room of dropped history back to the disk. The member answers no request meanwhile; one at a time."""
    client.gateway.call_at(
        endpoint, "/v3/maintenance/defragment", {}, lambda answer: None, what="etcd defragmentation",
        deadline_s=_DEFRAGMENT_S,
    )  # fmt: skip


class HistoryTrimmer:
    """Keeps about `retention_s` of history: at each call of `tick` it compacts to what was newest so long ago."""

    def __init__(self, client: EtcdClient, *, retention_s: float = 600.0, period_s: float = 60.0) -> None:
        self._client = client
        self._retention_s = retention_s
        self._period_s = period_s
        self._seen: deque[tuple[float, int]] = deque()

    def tick(self, now_s: float) -> int | None:
        """Note the revision of now, at most once a period; return the one compacted to, if any.

        Raises: CoordinationError; call again later.
        """
        if self._seen and now_s - self._seen[-1][0] < self._period_s:
            return None
        answer = self._client.read(Range(KeyRange.key(b"\0"), limit=1, has_values=False))
        self._seen.append((now_s, answer.revision))
        due: int | None = None
        while self._seen[0][0] <= now_s - self._retention_s:
            due = self._seen.popleft()[1]
        if due is not None:
            compact(self._client, due)
        return due


def _read_status(answer: JsonObject) -> MemberStatus:
    version, errors = answer.get("version"), answer.get("errors", [])
    if not isinstance(version, str) or not isinstance(errors, list):
        raise MalformedError("no version")
    header: dict[str, Any] = answer["header"]
    return MemberStatus(
        member_id=int_field(header, "member_id"),
        version=version,
        revision=header_revision(answer),
        leader_id=int_field(answer, "leader"),
        database_bytes=int_field(answer, "dbSize"),
        used_bytes=int_field(answer, "dbSizeInUse"),
        errors=tuple(map(str, errors)),
    )


def _read_alarms(answer: JsonObject) -> tuple[Alarm, ...]:
    return tuple(
        Alarm(str(raw.get("alarm", "NONE")), int_field(raw, "memberID")) for raw in list_field(answer, "alarms")
    )


def _read_members(answer: JsonObject) -> tuple[Member, ...]:
    return tuple(
        Member(int_field(raw, "ID"), str(raw.get("name", "")), tuple(map(str, raw.get("clientURLs", []))))
        for raw in list_field(answer, "members")
    )
