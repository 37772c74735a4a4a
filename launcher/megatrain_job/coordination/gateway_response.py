"""Reads the gateway's responses: JSON objects, and errors in the forms of etcd 3.4, 3.5 and 3.6.

etcd 3.4 and 3.5 send `{"error": text, "code": n, "message": text}`, 3.6 omits "error"; in a stream the error is an
object, with "grpc_code" (3.4, 3.5) or "code" (3.6). Codes are those of gRPC.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from megatrain.contracts.errors import CoordinationError, CoordinationRefusedError
from megatrain_job.coordination.errors import (
    CompactedError,
    FutureRevisionError,
    InvalidResponseError,
    LeaseExistsError,
    LeaseLostError,
    NoSpaceError,
)

JsonObject = Mapping[str, Any]
_SHOWN = 80
_MAX_MESSAGE = 400
_MAX_VALUES = 1 << 21
"""The most objects, lists and elements of one response: two million of them take up to 200 MB. A page of 500 keys has
5,000."""


class GrpcCode(IntEnum):
    """The codes that this client distinguishes."""

    CANCELLED = 1
    UNKNOWN = 2
    DEADLINE_EXCEEDED = 4
    PERMISSION_DENIED = 7
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


_PASSING = frozenset(
    {
        GrpcCode.CANCELLED,
        GrpcCode.UNKNOWN,
        GrpcCode.DEADLINE_EXCEEDED,
        GrpcCode.ABORTED,
        GrpcCode.INTERNAL,
        GrpcCode.UNAVAILABLE,
    }
)
"""Codes of temporary errors: another member, or a later try, may succeed."""

_NOT_APPLIED = ("too many requests", "no leader", "not capable")
"""Parts of error messages that show that the server did not begin to apply the request."""


class MalformedError(Exception):
    """A field of a response is missing or of another type: the server is not etcd."""


class GatewayError(Exception):
    """etcd answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def is_passing(self) -> bool:
        """Whether another try may succeed."""
        return self.code in _PASSING or "too many requests" in self.message

    @property
    def may_have_applied(self) -> bool:
        return not any(part in self.message for part in _NOT_APPLIED)

    @property
    def wants_new_token(self) -> bool:
        return self.code == GrpcCode.UNAUTHENTICATED or "revision of auth store is old" in self.message

    def typed(self, what: str, endpoint: str, key: str | None) -> CoordinationError:
        """Return the error that a caller can handle."""
        message = f"{what}: {self.message} ({endpoint})"
        kind: type[CoordinationError] = CoordinationError
        if self.wants_new_token or self.code == GrpcCode.PERMISSION_DENIED or "invalid user ID or pass" in self.message:
            kind = CoordinationRefusedError
        elif "user name is empty" in self.message:
            kind = CoordinationRefusedError
            message += "; this cluster requires a user and a password"
        elif "authentication is not enabled" in self.message:
            kind = CoordinationRefusedError
            message += "; enable it there, or give no user here"
        elif "database space exceeded" in self.message:
            kind = NoSpaceError
            message += "; compact, defragment and disarm the alarm"
        elif "has been compacted" in self.message:
            kind = CompactedError
        elif "is a future revision" in self.message:
            kind = FutureRevisionError
        elif "lease already exists" in self.message:
            kind = LeaseExistsError
        elif "lease not found" in self.message:
            kind = LeaseLostError
        return kind(message, endpoints=(endpoint,), key=key)


def parse_object(content: bytes) -> JsonObject:
    """Return a response's JSON object. Raises: InvalidResponseError."""
    # checked before parsing: three bytes of JSON can become a hundred in memory. Base64 has none of these characters
    if sum(map(content.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise InvalidResponseError(f"the answer holds more than {_MAX_VALUES} values: {content[:_SHOWN]!r}")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidResponseError(f"the answer is not JSON: {content[:_SHOWN]!r}") from error
    if not isinstance(value, dict):
        raise InvalidResponseError(f"the answer is not a JSON object: {content[:_SHOWN]!r}")
    return value


def read_response(status: int, content: bytes) -> JsonObject:
    """Return the object in a response. Raises: GatewayError, or InvalidResponseError if it is not from etcd."""
    if status != 200:
        try:
            raise read_error(parse_object(content))
        except (InvalidResponseError, MalformedError) as error:
            raise InvalidResponseError(f"HTTP status {status}: {content[:_SHOWN]!r}") from error
    return parse_object(content)


def read_error(response: JsonObject) -> GatewayError:
    """Return the error in a response, or in the "error" of a stream's message. Raises: MalformedError."""
    code = response.get("code", response.get("grpc_code"))
    message = response.get("message", response.get("error"))
    if not isinstance(code, int) or not isinstance(message, str):
        raise MalformedError(f"an error without code and message: {str(response)[:_SHOWN]}")
    return GatewayError(code, message[:_MAX_MESSAGE])


def unwrap(message: JsonObject) -> JsonObject:
    """Return the result in a stream's message. Raises: GatewayError; InvalidResponseError if it is not from etcd."""
    error = message.get("error")
    if isinstance(error, dict):
        try:
            raise read_error(error)
        except MalformedError as malformed:
            raise InvalidResponseError(str(malformed)) from malformed
    result = message.get("result")
    if not isinstance(result, dict):
        raise InvalidResponseError(f"a message without result: {str(message)[:_SHOWN]}")
    return result


def without_envelope(response: JsonObject) -> JsonObject:
    """Return the result in a response: etcd answers a streaming call (lease keepalive) with a stream's message."""
    return unwrap(response) if response.keys() <= {"result", "error"} and response else response
