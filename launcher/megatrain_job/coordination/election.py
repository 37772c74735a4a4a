"""One leader among many candidates, and writes that only a leader can make.

As in etcd's own elections, each candidate has a key with its lease below a common prefix, and the oldest key leads.
Each candidate watches only the one before it, so that the end of a leader wakes one host and not a thousand. A leader's
token is its key's create revision: later leaders have higher tokens, and a guarded transaction is applied only while
the key exists. A key without a lease is not a candidate: it would never expire, and is skipped.

A leader's leadership revision is its key's mod revision. Each transaction of the leader requires the current leadership
revision, and changes it. So if the response to a transaction is lost, and etcd applies it late, it has no effect once
the leadership revision is renewed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.errors import LeadershipLostError, LeaseLostError, UnknownOutcomeError
from megatrain_job.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain_job.coordination.operation_responses import TxnResponse
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import ChangeKind, Changes, Snapshot
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
    shown,
)

_logger = logging.getLogger(__name__)
_POLL_S = 0.25
"""The interval at which a waiting candidate checks for cancellation; the event that it waits for wakes it at once."""
_ASK_S = 1.0
"""A waiting candidate calls `is_dead` for the candidate before it once in this many seconds."""
_ASK_SOON_S = 0.25
"""The same interval while something points to that candidate's death: `is_suspected`, or `is_dead` returned True."""


class Leadership:
    """The result of a won campaign. Leadership ends when the lease is lost, or by `resign`."""

    def __init__(self, client: EtcdClient, keeper: LeaseKeeper, key: bytes, value: Text, token: int) -> None:
        self.key = key
        self.token = token
        self._client = client
        self._keeper = keeper
        self._value = value
        self._revision: int | None = None

    @property
    def is_certain(self) -> bool:
        """Whether no other candidate can lead at this moment, by the clock of this host. Makes no call."""
        return self._keeper.state is LeaseState.HELD

    def renew_revision(self) -> int:
        """Rewrite this leader's key, and return the revision: no earlier transaction of this leader can be applied any
        more.

        Call it after an UnknownOutcomeError, and before reading the state for the next decision.

        Raises: LeadershipLostError; UnknownOutcomeError: call it again.
        """
        return self._write((), ()).revision

    def txn(self, then: Sequence[Operation], conditions: Sequence[Compare] = ()) -> TxnResponse:
        """Do the same as `EtcdClient.txn`, but only while this leadership lasts, and without a second try after an
        unknown outcome.

        Raises: LeadershipLostError when the leadership has ended: nothing was written. UnknownOutcomeError as
        `EtcdClient.txn`, or when another client wrote to this leader's key. RuntimeError when the leadership revision
        must be renewed first.
        """
        if self._revision is None:
            raise RuntimeError("the revision of this leadership must be renewed first")
        return self._write(then, (Compare.mod_revision(self.key, self._revision), *conditions))

    def _write(self, then: Sequence[Operation], conditions: Sequence[Compare]) -> TxnResponse:
        before = self._revision
        own = Put(self.key, self._value, is_lease_kept=True)
        current = Range(KeyRange.key(self.key), has_values=False)
        guard = Compare.create_revision(self.key, self.token)
        try:
            response = self._client.txn([guard, *conditions], [*then, own], [current])
        except UnknownOutcomeError:
            self._revision = None
            raise
        if response.succeeded:
            self._revision = response.revision
            return response
        items = response.range_response(0).items
        if not items or items[0].create_revision != self.token:
            raise LeadershipLostError(f"leadership with token {self.token} is over", key=shown(self.key))
        if before is not None and items[0].mod_revision != before:
            self._revision = None
            raise UnknownOutcomeError("another client wrote to the key of this leadership", key=shown(self.key))
        return TxnResponse(response.revision, response.succeeded, response.responses[1:])

    def resign(self) -> None:
        """End this leadership; the next candidate leads. The lease is kept."""
        guard = Compare.create_revision(self.key, self.token)
        self._client.txn([guard], [Delete(KeyRange.key(self.key))], is_repeatable=True)


class DeathChecks:
    """Decides when a candidate asks whether the one before it is dead, and when this is proven. Not thread-safe."""

    def __init__(self) -> None:
        self._asked_at_s = -math.inf
        self._was_dead = False

    def is_due(self, now_s: float, *, is_suspected: bool) -> bool:
        """Return whether to ask now. Times are monotonic."""
        return now_s >= self._asked_at_s + (_ASK_SOON_S if self._was_dead or is_suspected else _ASK_S)

    def proves(self, now_s: float, *, is_dead: bool) -> bool:
        """Record an answer, and return whether it proves the death: the answer before it was the same."""
        is_proven = is_dead and self._was_dead
        self._asked_at_s, self._was_dead = now_s, is_dead
        return is_proven


class Election:
    """The election below a prefix; `etcdctl elect` may take part."""

    def __init__(self, client: EtcdClient, name: Text) -> None:
        self._client = client
        self._prefix = as_bytes(name) + b"/"

    def leader(self) -> KeyValue | None:
        """Return the leader's key, or None. Its create revision is the leader's token."""
        return leading_key(self._client.read_all(KeyRange.prefix(self._prefix)).items)

    def campaign(
        self,
        keeper: LeaseKeeper,
        value: Text,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
        is_dead: Callable[[KeyValue], bool] = lambda item: False,
        is_suspected: Callable[[], bool] = lambda: False,
    ) -> Leadership | None:
        """Wait until this candidate leads. If cancelled, withdraw its key and return None.

        `is_dead` is called every second with the key of the candidate before this one, and four times a second while
        `is_suspected` returns True or the last call returned True. If `is_dead` returns True twice in a row, that
        candidate's process is proven dead: this candidate revokes the dead one's lease, which deletes all its keys,
        instead of waiting for the TTL.

        Raises: LeaseLostError or LeadershipLostError when the keeper's lease is lost meanwhile; CoordinationError when
        etcd cannot be reached. Then the key may still exist and win: campaign again with the same keeper, or close the
        keeper.
        """
        key = self._prefix + f"{keeper.lease_id:x}".encode("ascii")
        token = self._enter(key, value, keeper)
        leadership = Leadership(self._client, keeper, key, value, token)

        strays: set[bytes] = set()
        newest = token - 1
        while not is_cancelled():
            earlier = Range(KeyRange.prefix(self._prefix), limit=1, max_create_revision=newest, is_newest_first=True)
            response = self._client.read(earlier)
            if not response.items:
                # an empty read does not prove that this candidate's key exists
                leadership.renew_revision()
                return leadership
            (item,) = response.items
            if item.lease_id:
                self._wait_for_end(item, response.revision + 1, keeper, is_cancelled, is_dead, is_suspected)
                newest = token - 1
                continue
            newest = item.create_revision - 1
            if item.key not in strays:
                strays.add(item.key)
                _logger.warning("key %s has no lease: it is not a candidacy and is ignored", shown(item.key))
        leadership.resign()
        return None

    def _enter(self, key: bytes, value: Text, keeper: LeaseKeeper) -> int:
        """Write the candidate's key unless an earlier campaign with this lease did; return its create revision."""
        put = Put(key, value, keeper.lease_id)
        # a repeated transaction finds the key of its first try
        response = self._client.txn([Compare.is_absent(key)], [put], [Range(KeyRange.key(key))], is_repeatable=True)
        if response.succeeded:
            return response.revision
        item = response.range_response(0).first()
        if item.value != as_bytes(value) or item.lease_id != keeper.lease_id:
            self._client.txn([Compare.create_revision(key, item.create_revision)], [put], is_repeatable=True)
        return item.create_revision

    def _wait_for_end(
        self,
        item: KeyValue,
        start_revision: int,
        keeper: LeaseKeeper,
        is_cancelled: Callable[[], bool],
        is_dead: Callable[[KeyValue], bool],
        is_suspected: Callable[[], bool],
    ) -> None:
        """Wait until the key of an item is gone, the watch ends, or the campaign is cancelled."""
        checks = DeathChecks()
        with Watch(self._client, KeyRange.key(item.key), start_revision=start_revision) as watch:
            while watch.is_open and not is_cancelled():
                if keeper.state is LeaseState.LOST:
                    raise LeaseLostError(f"campaign {shown(self._prefix)}: {keeper.lost_because}", key=shown(item.key))
                if checks.is_due(time.monotonic(), is_suspected=is_suspected()):
                    is_found_dead = is_dead(item)
                    if checks.proves(time.monotonic(), is_dead=is_found_dead):
                        _logger.warning("candidate %s is proven dead: its lease is revoked", shown(item.value))
                        self._client.revoke_lease(item.lease_id)
                match watch.next(_POLL_S):
                    case Snapshot(items=items):
                        if not items:
                            return
                    case Changes(changes=changes):
                        if any(change.kind is ChangeKind.DELETE for change in changes):
                            return
                    case None:
                        pass


def leading_key(candidates: Iterable[KeyValue]) -> KeyValue | None:
    """Return the key that leads, or None: the oldest one with a lease."""
    return min((item for item in candidates if item.lease_id), key=lambda item: item.create_revision, default=None)
