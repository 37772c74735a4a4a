"""One leader among many candidates, and writes that only a leader can make.

As etcd's own elections: a candidate's key lives with its lease below a common prefix, the oldest key leads, and each
candidate watches only the one before it, so that a leader's end wakes one host and not a thousand. A leader's token is
its key's create revision: later leaders have higher ones, and a guarded transaction is applied only while that key
stands. A key without a lease is no candidacy: it would never expire, and is skipped.

A leader's mark is its key's mod revision. Each transaction of a leader asks for the mark of before and moves it on. So
one whose answer was lost, and which etcd applies late, changes nothing once the mark was renewed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from megatrain.coordination.client import EtcdClient
from megatrain.coordination.deadline import Deadline
from megatrain.coordination.errors import LeadershipLostError, LeaseLostError, UnknownOutcomeError
from megatrain.coordination.lease_keeper import LeaseKeeper, LeaseState
from megatrain.coordination.watch import ChangeKind, Changes, Snapshot, Watch, WatchLimits
from megatrain.coordination.wire import (
    Compare,
    Delete,
    KeyRange,
    KeyValue,
    Operation,
    Put,
    Range,
    Text,
    TxnAnswer,
    as_bytes,
    shown,
)

_logger = logging.getLogger(__name__)
_LOOK_S = 0.25
"""How often a waiting candidate looks whether it should stop; what it waits for wakes it at once."""
_ASK_S = 1.0
"""How often a waiting candidate asks whether the one before it is dead."""
_ASK_AGAIN_S = 0.25
"""How soon it asks again after the first refusal."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads: the value that it campaigned with, and its token."""

    key: bytes
    value: bytes
    token: int

    @classmethod
    def from_item(cls, item: KeyValue) -> Self:
        return cls(item.key, item.value, item.create_revision)


class Leadership:
    """What a won campaign gives. It is over when the lease is lost, or by `resign`."""

    def __init__(self, client: EtcdClient, keeper: LeaseKeeper, key: bytes, value: Text, token: int) -> None:
        self.key = key
        self.token = token
        self._client = client
        self._keeper = keeper
        self._value = value
        self._mark: int | None = None

    @property
    def is_certain(self) -> bool:
        """Whether no other candidate can lead at this moment, by the clock of this host. Makes no call."""
        return self._keeper.state is LeaseState.HELD

    def renew_mark(self) -> int:
        """Write the own key anew, and return the revision: no earlier transaction of this leader is applied any more.

        To be called after an UnknownOutcomeError, and before what the next decision rests on is read.

        Raises: LeadershipLostError; UnknownOutcomeError, when it must be called again.
        """
        return self._write((), (), (), None).revision

    def txn(
        self,
        then: Sequence[Operation],
        conditions: Sequence[Compare] = (),
        otherwise: Sequence[Operation] = (),
        *,
        deadline_s: float | None = None,
    ) -> TxnAnswer:
        """Do as `EtcdClient.txn`, but only while this leadership lasts; no second try after an unknown outcome.

        Raises: LeadershipLostError when it does not: nothing was written. UnknownOutcomeError as `EtcdClient.txn`.
        """
        if self._mark is None:
            raise RuntimeError("the mark of this leadership must be renewed first")
        return self._write(then, (Compare.mod_revision(self.key, self._mark), *conditions), otherwise, deadline_s)

    def _write(
        self,
        then: Sequence[Operation],
        conditions: Sequence[Compare],
        otherwise: Sequence[Operation],
        deadline_s: float | None,
    ) -> TxnAnswer:
        before = self._mark
        own = Put(self.key, self._value, is_lease_kept=True)
        look = Range(KeyRange.key(self.key), has_values=False)
        guard = Compare.create_revision(self.key, self.token)
        try:
            answer = self._client.txn([guard, *conditions], [*then, own], [look, *otherwise], deadline_s=deadline_s)
        except UnknownOutcomeError:
            self._mark = None
            raise
        if answer.is_met:
            self._mark = answer.revision
            return answer
        items = answer.range_answer(0).items
        if not items or items[0].create_revision != self.token:
            raise LeadershipLostError(f"leadership with token {self.token} is over", key=shown(self.key))
        if before is not None and items[0].mod_revision != before:
            self._mark = None
            raise UnknownOutcomeError("somebody else wrote to the key of this leadership", key=shown(self.key))
        return TxnAnswer(answer.revision, answer.is_met, answer.answers[1:])

    def proclaim(self, value: Text) -> None:
        """Change what observers see. Raises: LeadershipLostError."""
        self._value = value
        self.renew_mark()

    def resign(self) -> None:
        """Step down; the next candidate leads. The lease lives on."""
        guard = Compare.create_revision(self.key, self.token)
        self._client.txn([guard], [Delete(KeyRange.key(self.key))], is_repeatable=True)


class Election:
    """The election below a prefix; `etcdctl elect` may take part."""

    def __init__(self, client: EtcdClient, name: Text) -> None:
        self._client = client
        self._prefix = as_bytes(name) + b"/"

    def leader(self) -> Leader | None:
        """Return who leads now."""
        first = _oldest_of(self._client.read_all(KeyRange.prefix(self._prefix)).items)
        return None if first is None else Leader.from_item(first)

    def campaign(
        self,
        keeper: LeaseKeeper,
        value: Text,
        *,
        timeout_s: float | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
        is_dead: Callable[[KeyValue], bool] = lambda item: False,
    ) -> Leadership | None:
        """Wait until this candidate leads; return None when it was cancelled or out of time, its key withdrawn.

        `is_dead` is asked about the key of the candidate before this one, every second. Said twice in a row that its
        process is proven dead, this one ends its lease, with all its keys, rather than wait for the TTL.

        Raises: LeaseLostError or LeadershipLostError when the keeper's lease is lost meanwhile; CoordinationError when
        etcd is out of reach.
        Then the key may stand and its turn come: campaign again with the same keeper, or close the keeper.
        """
        deadline = None if timeout_s is None else Deadline(timeout_s)
        key = self._prefix + f"{keeper.lease_id:x}".encode("ascii")
        token = self._enter(key, value, keeper)
        leadership = Leadership(self._client, keeper, key, value, token)

        def must_stop() -> bool:
            return is_cancelled() or (deadline is not None and deadline.left_s <= 0)

        strays: set[bytes] = set()
        newest = token - 1
        while not must_stop():
            before_us = Range(KeyRange.prefix(self._prefix), limit=1, max_create_revision=newest, is_newest_first=True)
            answer = self._client.read(before_us)
            if not answer.items:
                # an empty read does not say that our own key stands
                leadership.renew_mark()
                return leadership
            (item,) = answer.items
            if item.lease_id:
                self._wait_for_end(item, answer.revision + 1, keeper, must_stop, is_dead)
                newest = token - 1
                continue
            newest = item.create_revision - 1
            if item.key not in strays:
                strays.add(item.key)
                _logger.warning("key %s has no lease: it is no candidacy, and is ignored", shown(item.key))
        leadership.resign()
        return None

    def observe(self, *, limits: WatchLimits | None = None) -> LeaderWatch:
        """Return a watch that tells each change of leaders."""
        return LeaderWatch(self._client, self._prefix, limits)

    def _enter(self, key: bytes, value: Text, keeper: LeaseKeeper) -> int:
        """Put the candidate's key and return its create revision; with the same lease it may be there already."""
        put = Put(key, value, keeper.lease_id)
        # a repetition finds the key of the try before
        answer = self._client.txn([Compare.is_absent(key)], [put], [Range(KeyRange.key(key))], is_repeatable=True)
        if answer.is_met:
            return answer.revision
        item = answer.range_answer(0).first()
        if item.value != as_bytes(value) or item.lease_id != keeper.lease_id:
            self._client.txn([Compare.create_revision(key, item.create_revision)], [put], is_repeatable=True)
        return item.create_revision

    def _wait_for_end(
        self,
        item: KeyValue,
        start_revision: int,
        keeper: LeaseKeeper,
        must_stop: Callable[[], bool],
        is_dead: Callable[[KeyValue], bool],
    ) -> None:
        """Wait until the key of an item is gone, or its fate is to be looked up again."""
        ask_at, was_dead = time.monotonic(), False
        with Watch(self._client, KeyRange.key(item.key), start_revision=start_revision) as watch:
            while watch.is_open and not must_stop():
                if keeper.state is LeaseState.LOST:
                    raise LeaseLostError(f"campaign {shown(self._prefix)}: {keeper.lost_because}", key=shown(item.key))
                if time.monotonic() >= ask_at:
                    was_dead, is_sure = is_dead(item), was_dead
                    ask_at = time.monotonic() + (_ASK_AGAIN_S if was_dead else _ASK_S)
                    if was_dead and is_sure:
                        _logger.warning("candidate %s is proven dead: its lease is ended", shown(item.value))
                        self._client.revoke_lease(item.lease_id)
                match watch.next(_LOOK_S):
                    case Snapshot(items=items):
                        if not items:
                            return
                    case Changes(changes=changes):
                        if any(change.kind is ChangeKind.DELETE for change in changes):
                            return
                    case None:
                        pass


class LeaderWatch:
    """Tells who leads, first now and then at each change. For one thread."""

    def __init__(self, client: EtcdClient, prefix: bytes, limits: WatchLimits | None) -> None:
        self._watch = Watch(client, KeyRange.prefix(prefix), limits=limits)
        self._candidates: dict[bytes, KeyValue] = {}
        self._leader: Leader | None = None
        self._is_first = True

    @property
    def leader(self) -> Leader | None:
        """Who led when `next` returned last."""
        return self._leader

    def next(self, timeout_s: float | None = None) -> bool:
        """Wait for another leader, or none, or another value of the same; return whether `leader` changed in time.

        Raises: CoordinationRefusedError.
        """
        deadline = None if timeout_s is None else Deadline(timeout_s)
        while True:
            left_s = None if deadline is None else max(deadline.left_s, 0.0)
            event = self._watch.next(left_s)
            if event is None:
                return False
            self._take(event)
            first = _oldest_of(tuple(self._candidates.values()))
            leader = None if first is None else Leader.from_item(first)
            if leader != self._leader or self._is_first:
                self._leader, self._is_first = leader, False
                return True

    def close(self) -> None:
        self._watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, event: Changes | Snapshot) -> None:
        match event:
            case Snapshot(items=items):
                self._candidates = {item.key: item for item in items}
            case Changes(changes=changes):
                for change in changes:
                    if change.kind is ChangeKind.PUT:
                        self._candidates[change.item.key] = change.item
                    else:
                        self._candidates.pop(change.item.key, None)


def _oldest_of(items: Sequence[KeyValue]) -> KeyValue | None:
    """Return the key that leads: the oldest of those that a candidate keeps."""
    return min((item for item in items if item.lease_id), key=lambda item: item.create_revision, default=None)
