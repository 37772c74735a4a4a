"""The events of a watch: the changes of a transaction, or the content of the whole range."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megatrain_job.coordination.gateway_response import JsonObject, MalformedError
from megatrain_job.coordination.wire import KeyRange, KeyValue, shown


class ChangeKind(Enum):
    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one key. For a deletion only the key and `mod_revision` (of the deletion) are valid."""

    kind: ChangeKind
    item: KeyValue


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes of one transaction within the range."""

    revision: int
    changes: tuple[Change, ...]

    @property
    def written(self) -> tuple[KeyValue, ...]:
        """The keys that were put."""
        return tuple(change.item for change in self.changes if change.kind is ChangeKind.PUT)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole range at a revision, which replaces the consumer's earlier content. reason: why it was sent."""

    revision: int
    items: tuple[KeyValue, ...]
    reason: str

    @property
    def written(self) -> tuple[KeyValue, ...]:
        """The keys that exist."""
        return self.items


WatchEvent = Changes | Snapshot


def read_change(raw: JsonObject, keys: KeyRange, newest: int) -> Change:
    """Return an event of a range, sent when the store was at revision `newest`. Raises: MalformedError."""
    item, kind = raw.get("kv"), raw.get("type", "PUT")
    if not isinstance(item, dict) or kind not in ("PUT", "DELETE"):
        raise MalformedError(f"an event that is not a change of a key: {raw!s:.60}")
    change = Change(ChangeKind.DELETE if kind == "DELETE" else ChangeKind.PUT, KeyValue.from_json(item))
    if change.item.key not in keys or change.item.mod_revision > newest:
        found = f"key {shown(change.item.key)[:60]} at revision {change.item.mod_revision}"
        raise MalformedError(f"an event of {found}, in a watch of {keys} at revision {newest}")
    return change
