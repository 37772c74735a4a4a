"""The etcd client: reads, writes, deletions, transactions and leases.

Objects that use a client for longer have their own modules: lease keepers, watches and elections.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination.errors import CompactedError, FutureRevisionError, LeaseExistsError, LeaseLostError
from megatrain_job.coordination.gateway import Gateway
from megatrain_job.coordination.gateway_response import JsonObject, MalformedError
from megatrain_job.coordination.json_fields import int_field
from megatrain_job.coordination.operation_responses import DeleteResponse, PutResponse, RangeResponse, TxnResponse
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.transport import Deadline
from megatrain_job.coordination.wire import (
    Compare,
    Delete,
    KeyRange,
    KeyValue,
    Operation,
    Put,
    Range,
    Text,
    as_bytes,
    operation_to_json,
    shown,
)

Answer = TypeVar("Answer")
_PAGE_KEYS = 500
_MAX_READS = 5
_MAX_LEASE_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted lease. etcd may grant a longer TTL than the requested one."""

    lease_id: int
    ttl_s: int


class EtcdClient(Closable):
    """Safe to use from many threads. Every method raises CoordinationError naming endpoints and key.

    A call that was sent and not answered is sent again, to every endpoint until the deadline, because applying it twice
    has the same effect as once; a transaction only if its caller states this (`is_repeatable`).
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self.gateway = Gateway(settings)

    def close(self) -> None:
        """Close all connections. Calls and campaigns in progress fail; watches and renewals of leases end."""
        self.gateway.close()

    def get(self, key: Text, *, revision: int = 0, deadline_s: float | None = None) -> KeyValue | None:
        """Return a key with its newest value, or that at `revision`; None if the key did not exist then."""
        items = self.read(Range(KeyRange.key(key), revision=revision), deadline_s=deadline_s).items
        return items[0] if items else None

    def read(self, request: Range, *, deadline_s: float | None = None) -> RangeResponse:
        """Return the content of a range, the newest or that at the request's revision.

        The answer comes from a member that has confirmed that it is up to date.
        Raises: CompactedError or FutureRevisionError when etcd does not have the request's revision.
        """

        def decode(response: JsonObject) -> RangeResponse:
            return RangeResponse.from_json(response, request)

        return self._call("/v3/kv/range", request.to_json(), decode, "read", request.keys, deadline_s)

    def read_all(self, keys: KeyRange, *, has_values: bool = True, page_keys: int = _PAGE_KEYS) -> RangeResponse:
        """Return the whole range at one revision, read in pages.

        Raises: CompactedError or FutureRevisionError when etcd no longer had the revision after the first page, five
        times in a row.
        """
        return _until_kept(partial(self._read_pages, keys, has_values, page_keys))

    def read_together(self, requests: Sequence[Range], *, num_at_once: int = 1) -> tuple[RangeResponse, ...]:
        """Return several ranges at one revision, the newest one when the first range is read.

        Each range is one call; `call_s` of the settings limits all calls together. The calls after the first are made
        `num_at_once` at a time, on separate connections, which the client keeps. They are not one transaction, because
        etcd 3.5.0 to 3.5.2 exits when the client of a transaction without writes gives up (etcd-io/etcd issue 14110).
        Raises: CompactedError or FutureRevisionError when etcd no longer had the revision after the first call, five
        times in a row; ValueError when a request has a revision.
        """
        if any(request.revision for request in requests):
            raise ValueError("ranges that are read together are at the newest revision; use `read` for another one")
        deadline = Deadline(self.settings.call_s)
        return _until_kept(partial(self._read_at_one_revision, requests, num_at_once, deadline))

    def _read_at_one_revision(
        self, requests: Sequence[Range], num_at_once: int, deadline: Deadline
    ) -> tuple[RangeResponse, ...]:
        def read(request: Range) -> RangeResponse:
            left_s = deadline.left_s
            if left_s <= 0:
                text = (
                    f"etcd read {request.keys}: no time left, because the reads before it took {deadline.seconds:.1f} s"
                )
                raise CoordinationError(text, key=shown(request.keys.start))
            return self.read(request, deadline_s=left_s)

        first = read(requests[0])
        rest = [replace(request, revision=first.revision) for request in requests[1:]]
        if num_at_once == 1:
            return (first, *map(read, rest))
        with ThreadPoolExecutor(num_at_once, thread_name_prefix="etcd-read") as pool:
            return (first, *pool.map(read, rest))

    def _read_pages(self, keys: KeyRange, has_values: bool, page_keys: int) -> RangeResponse:
        page = self.read(Range(keys, limit=page_keys, has_values=has_values))
        first, items = page, list(page.items)
        while page.has_more:
            rest = KeyRange(items[-1].key + b"\0", keys.end)
            page = self.read(Range(rest, limit=page_keys, revision=first.revision, has_values=has_values))
            items += page.items
        return RangeResponse(first.revision, tuple(items), has_more=False)

    def put(self, key: Text, value: Text, *, lease_id: int = 0, deadline_s: float | None = None) -> int:
        """Write a key and return the new revision. A repeated put may be applied after another client's put.

        Raises: LeaseLostError when the lease does not exist.
        """
        request = Put(key, value, lease_id)
        response = self._call(
            "/v3/kv/put", request.to_json(), PutResponse.from_json, "put", KeyRange.key(key), deadline_s, is_write=True
        )
        return response.revision

    def delete(self, keys: KeyRange | Text) -> DeleteResponse:
        """Delete a key or a range. The response counts the keys that the last try deleted."""
        request = Delete(keys if isinstance(keys, KeyRange) else KeyRange.key(keys))
        return self._call(
            "/v3/kv/deleterange",
            request.to_json(),
            DeleteResponse.from_json,
            "delete",
            request.keys,
            None,
            is_write=True,
        )

    def txn(
        self,
        conditions: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
        deadline_s: float | None = None,
    ) -> TxnResponse:
        """Carry out `then` if all conditions are met, `otherwise` if not, as one change.

        Raises: UnknownOutcomeError when the transaction may have been applied: read, and decide again; ValueError when
        it would only read: see `read_together`.
        """
        operations = (*then, *otherwise)
        if operations and all(isinstance(operation, Range) for operation in operations):
            raise ValueError("a transaction writes; ranges at one revision are read with EtcdClient.read_together")
        body = {
            "compare": [condition.to_json() for condition in conditions],
            "success": [operation_to_json(operation) for operation in then],
            "failure": [operation_to_json(operation) for operation in otherwise],
        }

        def decode(response: JsonObject) -> TxnResponse:
            return TxnResponse.from_json(response, then, otherwise)

        involved = [condition.key for condition in conditions] + [_first_key(operation) for operation in then]
        keys = KeyRange.key(involved[0]) if involved else None
        return self._call(
            "/v3/kv/txn", body, decode, "transaction on", keys, deadline_s,
            is_write=bool(operations), is_repeatable=is_repeatable,
        )  # fmt: skip

    def grant_lease(self, ttl_s: int) -> Lease:
        """Return a new lease. The client chooses the id, so that a repeated request does not grant a second one."""
        lease_id = secrets.randbelow(_MAX_LEASE_ID) + 1

        def decode(response: JsonObject) -> Lease:
            granted_s = int_field(response, "TTL")
            if granted_s <= 0 or int_field(response, "ID") != lease_id:
                raise MalformedError(f"requested lease {lease_id:x}, got {response!r:.120}")
            return Lease(lease_id, granted_s)

        body = {"ID": str(lease_id), "TTL": str(ttl_s)}
        try:
            return self._call("/v3/lease/grant", body, decode, "grant of a lease", None, None, is_write=True)
        except LeaseExistsError:
            # an earlier try was applied, and its response was lost
            return Lease(lease_id, self.granted_ttl_s(lease_id))

    def renew_lease(self, lease_id: int, *, deadline_s: float | None = None) -> int:
        """Keep a lease alive and return its TTL in seconds. Raises: LeaseLostError when etcd has no such lease."""
        what = f"renewal of lease {lease_id:x}"
        ttl_s = self._keep_alive(lease_id, what, deadline_s)
        if ttl_s <= 0:
            # A new leader may not have applied its whole log yet; a linearizable read waits until it has.
            self.read(Range(KeyRange.key(b"\0"), limit=1, has_values=False), deadline_s=deadline_s)
            ttl_s = self._keep_alive(lease_id, what, deadline_s)
        if ttl_s <= 0:
            raise LeaseLostError(f"etcd {what}: it has expired or was revoked; its keys are removed")
        return ttl_s

    def granted_ttl_s(self, lease_id: int) -> int:
        """Return the TTL with which a lease was granted, in seconds. Raises: LeaseLostError when it does not exist."""

        def decode(response: JsonObject) -> tuple[int, int]:
            return int_field(response, "TTL"), int_field(response, "grantedTTL")

        what = f"TTL of lease {lease_id:x}"
        left_s, granted_s = self._call("/v3/lease/timetolive", {"ID": str(lease_id)}, decode, what, None, None)
        if left_s < 0 or granted_s <= 0:
            raise LeaseLostError(f"etcd {what}: it has expired or was revoked; its keys are removed")
        return granted_s

    def revoke_lease(self, lease_id: int, *, deadline_s: float | None = None) -> bool:
        """End a lease and delete its keys. Return whether it existed."""
        body = {"ID": str(lease_id)}
        try:
            self._call(
                "/v3/lease/revoke", body, bool, f"revocation of lease {lease_id:x}", None, deadline_s, is_write=True
            )
        except LeaseLostError:
            return False
        return True

    def _keep_alive(self, lease_id: int, what: str, deadline_s: float | None) -> int:
        def decode(response: JsonObject) -> int:
            if int_field(response, "ID") != lease_id:
                raise MalformedError(f"requested lease {lease_id:x}, got {response!r:.120}")
            return int_field(response, "TTL")

        return self._call("/v3/lease/keepalive", {"ID": str(lease_id)}, decode, what, None, deadline_s)

    def _call(
        self,
        path: str,
        body: JsonObject,
        decode: Callable[[JsonObject], Answer],
        verb: str,
        keys: KeyRange | None,
        deadline_s: float | None,
        *,
        is_write: bool = False,
        is_repeatable: bool = True,
    ) -> Answer:
        what = f"etcd {verb}" if keys is None else f"etcd {verb} {keys}"
        key = None if keys is None else shown(keys.start)
        return self.gateway.call(
            path, body, decode,
            what=what, key=key, deadline_s=deadline_s, is_write=is_write, is_repeatable=is_repeatable,
        )  # fmt: skip


def _until_kept(read: Callable[[], Answer]) -> Answer:
    """Call `read`; repeat it when etcd no longer has the revision, up to _MAX_READS calls in all."""
    for _ in range(_MAX_READS - 1):
        try:
            return read()
        except (CompactedError, FutureRevisionError):
            continue
    return read()


def _first_key(operation: Operation) -> bytes:
    return as_bytes(operation.key) if isinstance(operation, Put) else operation.keys.start
