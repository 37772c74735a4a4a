"""The values that go to and come from etcd, and their form in its JSON.

The gateway speaks proto3's JSON: 64-bit integers are strings, fields that are zero are left out, bytes are base64.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from megatrain.contracts.errors import CoordinationError
from megatrain.coordination.gateway_answer import JsonObject, MalformedError

Text = str | bytes
"""A key or a value: text is taken as UTF-8."""
_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
"""int() would take spaces, underscores, other scripts' digits, and thousands of them."""
_NO_REVISION = 1 << 63


def as_bytes(text: Text) -> bytes:
    return text.encode("utf-8") if isinstance(text, str) else text


def shown(key: bytes) -> str:
    """Return a key as messages show it."""
    return repr(key.decode("utf-8", "backslashreplace"))


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def bytes_field(answer: JsonObject, name: str) -> bytes:
    value = answer.get(name, "")
    if not isinstance(value, str):
        raise MalformedError(f"{name}={value!r:.60} is no base64")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise MalformedError(f"{name}={value!r:.60} is no base64") from error


def int_field(answer: JsonObject, name: str) -> int:
    value = answer.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | str) or not _INTEGER.fullmatch(f"{value}"):
        raise MalformedError(f"{name}={value!r:.60} is no integer of 64 bits")
    return int(value)


def revision_field(answer: JsonObject, name: str) -> int:
    """Return a revision of the store; the first one is 1."""
    revision = int_field(answer, name)
    if not 0 < revision < _NO_REVISION:
        raise MalformedError(f"{name}={revision} is no revision")
    return revision


def list_field(answer: JsonObject, name: str) -> list[Mapping[str, Any]]:
    value = answer.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise MalformedError(f"{name} is no list of objects")
    return value


def flag_field(answer: JsonObject, name: str) -> bool:
    value = answer.get(name, False)
    if not isinstance(value, bool):
        raise MalformedError(f"{name}={value!r:.60} is no truth value")
    return value


def header_revision(answer: JsonObject) -> int:
    """Return the store's revision when the answer was made."""
    header = answer.get("header")
    if not isinstance(header, dict):
        raise MalformedError("no header")
    return revision_field(header, "revision")


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key with its value. `create_revision` stays while it lives, `mod_revision` changes with each put."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int

    @classmethod
    def from_json(cls, raw: JsonObject) -> Self:
        return cls(
            bytes_field(raw, "key"),
            bytes_field(raw, "value"),
            int_field(raw, "create_revision"),
            revision_field(raw, "mod_revision"),
            int_field(raw, "version"),
            int_field(raw, "lease"),
        )


@dataclass(frozen=True, slots=True)
class KeyRange:
    """One key (`end` is empty), or all from `start` up to but not `end`; an `end` of one zero byte is no limit."""

    start: bytes
    end: bytes = b""

    @classmethod
    def key(cls, key: Text) -> Self:
        return cls(as_bytes(key))

    @classmethod
    def prefix(cls, prefix: Text) -> Self:
        """Return the range of all keys that begin with `prefix`; an empty one is all keys."""
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
    """How what is compared must relate to what is given."""

    EQUAL = "EQUAL"
    NOT_EQUAL = "NOT_EQUAL"
    GREATER = "GREATER"
    LESS = "LESS"


class Target(StrEnum):
    """What of a key is compared. All revisions of an absent key are 0."""

    CREATE_REVISION = "CREATE"
    MOD_REVISION = "MOD"
    VERSION = "VERSION"
    LEASE = "LEASE"
    VALUE = "VALUE"


_TARGET_FIELDS = {
    Target.CREATE_REVISION: "create_revision",
    Target.MOD_REVISION: "mod_revision",
    Target.VERSION: "version",
    Target.LEASE: "lease",
}


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction. The comparison of a value, or of a lease, with an absent key is never met."""

    key: bytes
    target: Target
    relation: Relation
    operand: int | bytes

    @classmethod
    def is_absent(cls, key: Text) -> Self:
        return cls(as_bytes(key), Target.CREATE_REVISION, Relation.EQUAL, 0)

    @classmethod
    def is_present(cls, key: Text) -> Self:
        return cls(as_bytes(key), Target.CREATE_REVISION, Relation.GREATER, 0)

    @classmethod
    def create_revision(cls, key: Text, revision: int, relation: Relation = Relation.EQUAL) -> Self:
        return cls(as_bytes(key), Target.CREATE_REVISION, relation, revision)

    @classmethod
    def mod_revision(cls, key: Text, revision: int, relation: Relation = Relation.EQUAL) -> Self:
        return cls(as_bytes(key), Target.MOD_REVISION, relation, revision)

    @classmethod
    def version(cls, key: Text, version: int, relation: Relation = Relation.EQUAL) -> Self:
        return cls(as_bytes(key), Target.VERSION, relation, version)

    @classmethod
    def lease(cls, key: Text, lease_id: int, relation: Relation = Relation.EQUAL) -> Self:
        return cls(as_bytes(key), Target.LEASE, relation, lease_id)

    @classmethod
    def value(cls, key: Text, value: Text, relation: Relation = Relation.EQUAL) -> Self:
        return cls(as_bytes(key), Target.VALUE, relation, as_bytes(value))

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"key": to_base64(self.key), "target": self.target, "result": self.relation}
        if isinstance(self.operand, bytes):
            return fields | {"value": to_base64(self.operand)}
        return fields | {_TARGET_FIELDS[self.target]: str(self.operand)}


@dataclass(frozen=True, slots=True)
class Put:
    """Write one key. With a lease it lives as long as that; a put without one takes the key's lease away."""

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
    """Read a key or a range, in the order of the keys or from the newest created."""

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
    """Return an operation as a transaction holds it."""
    match operation:
        case Put():
            return {"request_put": operation.to_json()}
        case Delete():
            return {"request_delete_range": operation.to_json()}
        case Range():
            return {"request_range": operation.to_json()}


@dataclass(frozen=True, slots=True)
class RangeAnswer:
    """What a range held at `revision`; `count` is of the whole range, `has_more` says that a limit cut it."""

    revision: int
    items: tuple[KeyValue, ...]
    count: int
    has_more: bool

    @classmethod
    def from_json(cls, answer: JsonObject, request: Range) -> Self:
        """Read the answer to a request. Raises: MalformedError, also for keys that were not asked for."""
        items = tuple(KeyValue.from_json(raw) for raw in list_field(answer, "kvs"))
        has_more = flag_field(answer, "more")
        last: bytes | None = None
        for item in items:
            is_in_order = request.is_newest_first or last is None or item.key > last
            if item.key not in request.keys or not is_in_order:
                raise MalformedError(f"key {shown(item.key)[:60]} does not belong into an answer for {request.keys}")
            last = item.key
        if has_more and not items:
            raise MalformedError("more keys are to come, and none is here")
        return cls(header_revision(answer), items, int_field(answer, "count"), has_more)

    def first(self) -> KeyValue:
        """Return the first item of an answer that cannot be empty. Raises: CoordinationError when it is."""
        if not self.items:
            raise CoordinationError("etcd's answer contradicts itself: a key that it says is there is not in it")
        return self.items[0]


@dataclass(frozen=True, slots=True)
class PutAnswer:
    """The revision that a put made."""

    revision: int

    @classmethod
    def from_json(cls, answer: JsonObject) -> Self:
        return cls(header_revision(answer))


@dataclass(frozen=True, slots=True)
class DeleteAnswer:
    """How many keys were deleted, and the store's revision then."""

    revision: int
    num_deleted: int

    @classmethod
    def from_json(cls, answer: JsonObject) -> Self:
        return cls(header_revision(answer), int_field(answer, "deleted"))


OperationAnswer = PutAnswer | DeleteAnswer | RangeAnswer


@dataclass(frozen=True, slots=True)
class TxnAnswer:
    """Whether all conditions were met, and the answers of the operations that were carried out."""

    revision: int
    is_met: bool
    answers: tuple[OperationAnswer, ...]

    @classmethod
    def from_json(cls, answer: JsonObject, then: Sequence[Operation], otherwise: Sequence[Operation]) -> Self:
        """Read the answer to a transaction. Raises: MalformedError, also for answers to other operations."""
        is_met = flag_field(answer, "succeeded")
        asked, answers = then if is_met else otherwise, list_field(answer, "responses")
        if len(answers) != len(asked):
            raise MalformedError(f"{len(answers)} answers to {len(asked)} operations")
        return cls(header_revision(answer), is_met, tuple(map(_operation_answer, answers, asked)))

    def range_answer(self, index: int = 0) -> RangeAnswer:
        """Return the answer of an operation that was a Range. Raises: TypeError when it was another."""
        answer = self.answers[index]
        if not isinstance(answer, RangeAnswer):
            raise TypeError(f"operation {index} was answered with {type(answer).__name__}")
        return answer


def _operation_answer(raw: JsonObject, operation: Operation) -> OperationAnswer:
    match operation:
        case Put():
            return PutAnswer.from_json(_inner(raw, "response_put"))
        case Delete():
            return DeleteAnswer.from_json(_inner(raw, "response_delete_range"))
        case Range():
            return RangeAnswer.from_json(_inner(raw, "response_range"), operation)


def _inner(raw: JsonObject, name: str) -> JsonObject:
    inner = raw.get(name)
    if not isinstance(inner, dict):
        raise MalformedError(f"an operation with another answer than {name}: {str(sorted(raw))[:60]}")
    return inner
