"""The keys, values and operations that are sent to etcd, and their JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from megatrain_job.coordination.gateway_response import JsonObject
from megatrain_job.coordination.json_fields import bytes_field, int_field, revision_field, to_base64

Text = str | bytes
"""A key or a value: text is encoded as UTF-8."""


def as_bytes(text: Text) -> bytes:
    return text.encode("utf-8") if isinstance(text, str) else text


def shown(key: bytes) -> str:
    """Return a key in the form for messages."""
    return repr(key.decode("utf-8", "backslashreplace"))


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key with its value. `create_revision` is constant while the key exists; each put changes `mod_revision`."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int

    @classmethod
    def from_json(cls, raw: JsonObject) -> Self:
        return cls(
            bytes_field(raw, "key"),
            bytes_field(raw, "value"),
            int_field(raw, "create_revision"),
            revision_field(raw, "mod_revision"),
            int_field(raw, "lease"),
        )


@dataclass(frozen=True, slots=True)
class KeyRange:
    """One key (`end` is empty), or all keys with `start` <= key < `end`; an `end` of one zero byte is no limit."""

    start: bytes
    end: bytes = b""

    @classmethod
    def key(cls, key: Text) -> Self:
        return cls(as_bytes(key))

    @classmethod
    def prefix(cls, prefix: Text) -> Self:
        """Return the range of all keys that begin with `prefix`; an empty prefix means all keys."""
        start = as_bytes(prefix)
        kept = start.rstrip(b"\xff")
        end = kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"
        return cls(start or b"\0", end)

    def __contains__(self, key: bytes) -> bool:
        if not self.end:
            return key == self.start
        return self.start <= key and (self.end == bytes(1) or key < self.end)

    def to_json(self) -> dict[str, Any]:
        fields = {"key": to_base64(self.start)}
        return fields | {"range_end": to_base64(self.end)} if self.end else fields

    def __str__(self) -> str:
        if not self.end:
            return shown(self.start)
        return f"{shown(self.start)} to {'the end' if self.end == bytes(1) else shown(self.end)}"


class Relation(StrEnum):
    """The relation between the compared and the given value."""

    EQUAL = "EQUAL"
    GREATER = "GREATER"


class CompareTarget(StrEnum):
    """The compared property of a key. All revisions of an absent key are 0."""

    CREATE_REVISION = "CREATE"
    MOD_REVISION = "MOD"


_TARGET_FIELDS = {CompareTarget.CREATE_REVISION: "create_revision", CompareTarget.MOD_REVISION: "mod_revision"}


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction."""

    key: bytes
    target: CompareTarget
    relation: Relation
    operand: int

    @classmethod
    def is_absent(cls, key: Text) -> Self:
        return cls(as_bytes(key), CompareTarget.CREATE_REVISION, Relation.EQUAL, 0)

    @classmethod
    def is_present(cls, key: Text) -> Self:
        return cls(as_bytes(key), CompareTarget.CREATE_REVISION, Relation.GREATER, 0)

    @classmethod
    def create_revision(cls, key: Text, revision: int) -> Self:
        return cls(as_bytes(key), CompareTarget.CREATE_REVISION, Relation.EQUAL, revision)

    @classmethod
    def mod_revision(cls, key: Text, revision: int) -> Self:
        return cls(as_bytes(key), CompareTarget.MOD_REVISION, Relation.EQUAL, revision)

    def to_json(self) -> dict[str, Any]:
        field = _TARGET_FIELDS[self.target]
        return {"key": to_base64(self.key), "target": self.target, "result": self.relation, field: str(self.operand)}


@dataclass(frozen=True, slots=True)
class Put:
    """Write one key. etcd deletes a key when its lease ends. A put without a lease detaches the key from its lease,
    unless `is_lease_kept`.
    """

    key: Text
    value: Text
    lease_id: int = 0
    is_lease_kept: bool = False

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"key": to_base64(as_bytes(self.key)), "value": to_base64(as_bytes(self.value))}
        if self.lease_id:
            fields["lease"] = str(self.lease_id)
        if self.is_lease_kept:
            fields["ignore_lease"] = True
        return fields


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key or a range."""

    keys: KeyRange

    def to_json(self) -> dict[str, Any]:
        return self.keys.to_json()


@dataclass(frozen=True, slots=True)
class Range:
    """Read a key or a range, in the order of the keys, or with the newest key first."""

    keys: KeyRange
    limit: int = 0
    revision: int = 0
    max_create_revision: int = 0
    is_newest_first: bool = False
    has_values: bool = True

    def to_json(self) -> dict[str, Any]:
        fields = self.keys.to_json()
        for name in ("limit", "revision", "max_create_revision"):
            if getattr(self, name):
                fields[name] = str(getattr(self, name))
        if self.is_newest_first:
            fields |= {"sort_target": "CREATE", "sort_order": "DESCEND"}
        if not self.has_values:
            fields["keys_only"] = True
        return fields


Operation = Put | Delete | Range


def operation_to_json(operation: Operation) -> dict[str, Any]:
    """Return an operation in a transaction's form."""
    match operation:
        case Put():
            return {"request_put": operation.to_json()}
        case Delete():
            return {"request_delete_range": operation.to_json()}
        case Range():
            return {"request_range": operation.to_json()}
