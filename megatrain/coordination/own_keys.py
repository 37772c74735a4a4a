"""Keys that one program alone writes, in the order in which it does: no write that was given up follows a later one.

A plain put that was sent and not answered may be applied a minute later, and would bring back what has long been
otherwise. So each write here asks for the revision of the one before.
"""

from __future__ import annotations

from megatrain.contracts.errors import CoordinationError
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.errors import UnknownOutcomeError
from megatrain.coordination.wire import Compare, KeyRange, Put, Range

_TRIES = 3
"""The second one knows what stands there; a third one is for a lease that ended meanwhile."""


class OwnKeys:
    """Writes the keys of one program. For one thread. `guard`: what must hold besides for anything to be written."""

    def __init__(self, client: EtcdClient, guard: Compare | None = None) -> None:
        self._client = client
        self._guards = () if guard is None else (guard,)
        self._revisions: dict[str, int] = {}
        """Of each key as it was written last; 0: it is not there."""

    def put(self, key: str, value: bytes, *, lease_id: int = 0, deadline_s: float | None = None) -> None:
        """Write a key. Raises: LeaseLostError when the lease is not there; CoordinationError, also where the guard
        does not hold.
        """
        for _ in range(_TRIES):
            revision = self._revisions.get(key, 0)
            own = Compare.mod_revision(key, revision) if revision else Compare.is_absent(key)
            look = Range(KeyRange.key(key), has_values=False)
            try:
                answer = self._client.txn(
                    [*self._guards, own], [Put(key, value, lease_id)], [look], deadline_s=deadline_s
                )
            except UnknownOutcomeError:
                self._revisions.pop(key, None)
                raise
            if answer.is_met:
                self._revisions[key] = answer.revision
                return
            items = answer.range_answer(0).items
            self._revisions[key] = items[0].mod_revision if items else 0
        who = " or this program may not write it any more" if self._guards else ""
        raise CoordinationError(f"somebody else writes this key, too{who}", key=key)

    def forget(self, key: str) -> None:
        """Remember a key no longer, when it will not be written again."""
        self._revisions.pop(key, None)
