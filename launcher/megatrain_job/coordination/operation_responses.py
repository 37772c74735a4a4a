"""The responses of etcd to operations and transactions, read from JSON and checked against the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from megatrain.contracts.errors import CoordinationError
from megatrain_job.coordination.gateway_response import JsonObject, MalformedError
from megatrain_job.coordination.json_fields import flag_field, header_revision, int_field, list_field
from megatrain_job.coordination.wire import Delete, KeyValue, Operation, Put, Range, shown


@dataclass(frozen=True, slots=True)
class RangeResponse:
    """The content of a range at `revision`. has_more: a limit left keys out."""

    revision: int
    items: tuple[KeyValue, ...]
    has_more: bool

    @classmethod
    def from_json(cls, response: JsonObject, request: Range) -> Self:
        """Read the response to a request. Raises: MalformedError, also for keys that were not requested."""
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
        return cls(header_revision(response), items, has_more)

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
    """The number of deleted keys, and the store's revision after that."""

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
