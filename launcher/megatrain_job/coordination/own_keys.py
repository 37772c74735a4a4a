"""Writes keys of which this program is the only writer: an unanswered write is never applied after a later one.

A plain put that was sent and not answered may be applied a minute later, and would restore an outdated value. So each
write here requires the revision of the write before it.
"""

from __future__ import annotations

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.errors import UnknownOutcomeError
from megatrain_job.coordination.wire import Compare, KeyRange, Put, Range

_TRIES = 3
"""The second try uses the key's current revision; the third is for a key that its lease deleted in between."""


class OwnKeys:
    """Writes the keys of one program. Not thread-safe. guard: a further condition of every write."""

    def __init__(self, client: EtcdClient, guard: Compare | None = None) -> None:
        self._client = client
        self._guards = () if guard is None else (guard,)
        self._revisions: dict[str, int] = {}
        """The revision of each key's last write; 0: the key does not exist."""

    def put(self, key: str, value: bytes, *, lease_id: int = 0, deadline_s: float | None = None) -> None:
        """Write a key. Raises: LeaseLostError when the lease does not exist; CoordinationError, also when the guard
        does not hold.
        """
        for _ in range(_TRIES):
            revision = self._revisions.get(key, 0)
            own = Compare.mod_revision(key, revision) if revision else Compare.is_absent(key)
            current = Range(KeyRange.key(key), has_values=False)
            try:
                response = self._client.txn(
                    [*self._guards, own], [Put(key, value, lease_id)], [current], deadline_s=deadline_s
                )
            except UnknownOutcomeError:
                self._revisions.pop(key, None)
                raise
            if response.succeeded:
                self._revisions[key] = response.revision
                return
            items = response.range_response(0).items
            self._revisions[key] = items[0].mod_revision if items else 0
        guard = ", or this program has lost the right to write it" if self._guards else ""
        raise CoordinationError(f"another client writes this key too{guard}", key=key)

    def forget(self, key: str) -> None:
        """Drop the state of a key that will not be written again."""
        self._revisions.pop(key, None)
