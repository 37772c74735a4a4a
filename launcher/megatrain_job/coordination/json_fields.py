"""Reads the fields of etcd's JSON. A field of another type raises MalformedError.

The gateway uses proto3's JSON: 64-bit integers are strings, fields that are zero are omitted, bytes are base64.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from megatrain_job.coordination.gateway_response import JsonObject, MalformedError

_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
"""int() would also accept spaces, underscores, non-ASCII digits, and thousands of digits."""
_NO_REVISION = 1 << 63


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
    """Return the store's revision at the time of the response."""
    header = response.get("header")
    if not isinstance(header, dict):
        raise MalformedError("no header")
    return revision_field(header, "revision")
