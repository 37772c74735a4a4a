"""The values that are sent to and received from etcd, and their JSON form.

The gateway uses proto3's JSON: 64-bit integers are strings, fields that are zero are left out, bytes are base64.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination.gateway_response import JsonObject, MalformedError

Text = str | bytes
"""A key or a value: text is encoded as UTF-8."""
_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
"""int() would accept spaces, underscores, other scripts' digits, and thousands of them."""
_NO_REVISION = 1 << 63


def as_bytes(text: Text) -> bytes:
    return text.encode("utf-8") if isinstance(text, str) else text


def shown(key: bytes) -> str:
    """Return a key as messages show it."""
    return repr(key.decode("utf-8", "backslashreplace"))


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def bytes_field(response: JsonObject, name: str) -> bytes:
    value = response.get(name, "")
    if not isinstance(value, str):
        raise MalformedError(f"{name}={value!r:.60} is not base64")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise MalformedError(f"{name}={value!r:.60} is not base64") from error


def int_field(response: JsonObject, name: str) -> int:
    value = response.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | str) or not _INTEGER.fullmatch(f"{value}"):
        raise MalformedError(f"{name}={value!r:.60} is not an integer of 64 bits")
    return int(value)


def revision_field(response: JsonObject, name: str) -> int:
    """Return a revision of the store; the first one is 1."""
    revision = int_field(response, name)
    if not 0 < revision < _NO_REVISION:
        raise MalformedError(f"{name}={revision} is not a revision")
    return revision


def list_field(response: JsonObject, name: str) -> list[Mapping[str, Any]]:
    value = response.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise MalformedError(f"{name} is not a list of objects")
    return value


def flag_field(response: JsonObject, name: str) -> bool:
    value = response.get(name, False)
    if not isinstance(value, bool):
        raise MalformedError(f"{name}={value!r:.60} is not a boolean")
    return value


def header_revision(response: JsonObject) -> int:
    """Return the store's revision when the response was made."""
    header = response.get("header")
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
    """Write one key. With a lease it lives as long as the lease; a put without one detaches the key from its lease."""

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
    """Read a key or a range, in the order of the keys or newest created first."""

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


@dataclass(frozen=True, slots=True)
class RangeResponse:
    """The content of a range at `revision`; `count` is of the whole range, `has_more`: whether a limit cut it."""

    revision: int
    items: tuple[KeyValue, ...]
    count: int
    has_more: bool

    @classmethod
    def from_json(cls, response: JsonObject, request: Range) -> Self:
        """Read the response to a request. Raises: MalformedError, also for keys that were not asked for."""
        items = tuple(KeyValue.from_json(raw) for raw in list_field(response, "kvs"))
        has_more = flag_field(response, "more")
        last: bytes | None = None
        for item in items:
            is_in_order = request.is_newest_first or last is None or item.key > last
            if item.key not in request.keys or not is_in_order:
                raise MalformedError(f"key {shown(item.key)[:60]} is not part of an answer for {request.keys}")
            last = item.key
        if has_more and not items:
            raise MalformedError("the answer announces more keys but has none")
        return cls(header_revision(response), items, int_field(response, "count"), has_more)

    def first(self) -> KeyValue:
        """Return the first item of a response that cannot be empty. Raises: CoordinationError when it is."""
        if not self.items:
            raise CoordinationError("etcd's answer contradicts itself: it lacks a key that it reports as existing")
        return self.items[0]


@dataclass(frozen=True, slots=True)
class PutResponse:
    """The revision of a put."""

    revision: int

    @classmethod
    def from_json(cls, response: JsonObject) -> Self:
        return cls(header_revision(response))


@dataclass(frozen=True, slots=True)
class DeleteResponse:
    """How many keys were deleted, and the store's revision then."""

    revision: int
    num_deleted: int

    @classmethod
    def from_json(cls, response: JsonObject) -> Self:
        return cls(header_revision(response), int_field(response, "deleted"))


OperationResponse = PutResponse | DeleteResponse | RangeResponse


@dataclass(frozen=True, slots=True)
class TxnResponse:
    """Whether all conditions were met, and the responses of the operations that were carried out."""

    revision: int
    succeeded: bool
    responses: tuple[OperationResponse, ...]

    @classmethod
    def from_json(cls, response: JsonObject, then: Sequence[Operation], otherwise: Sequence[Operation]) -> Self:
        """Read the response to a transaction. Raises: MalformedError, also for responses to other operations."""
        succeeded = flag_field(response, "succeeded")
        asked, responses = then if succeeded else otherwise, list_field(response, "responses")
        if len(responses) != len(asked):
            raise MalformedError(f"{len(responses)} answers to {len(asked)} operations")
        return cls(header_revision(response), succeeded, tuple(map(_operation_response, responses, asked)))

    def range_response(self, index: int = 0) -> RangeResponse:
        """Return the response of an operation that was a Range. Raises: TypeError when it was another operation."""
        response = self.responses[index]
        if not isinstance(response, RangeResponse):
            raise TypeError(f"operation {index} was answered with {type(response).__name__}")
        return response


def _operation_response(raw: JsonObject, operation: Operation) -> OperationResponse:
    match operation:
        case Put():
            return PutResponse.from_json(_inner(raw, "response_put"))
        case Delete():
            return DeleteResponse.from_json(_inner(raw, "response_delete_range"))
        case Range():
            return RangeResponse.from_json(_inner(raw, "response_range"), operation)


def _inner(raw: JsonObject, name: str) -> JsonObject:
    inner = raw.get(name)
    if not isinstance(inner, dict):
        raise MalformedError(f"an operation with another answer than {name}: {str(sorted(raw))[:60]}")
    return inner
