"""Frozen dataclasses <-> JSON values in etcd: one codec for all that launcher, driver and command line tell each other.

A record's fields say what may be in it: str, int, float, bool, StrEnum, another record, tuple[X, ...], Mapping[str, X],
and any of them or None. Nothing is converted silently. A field that this program does not know is skipped, because
hosts of one job may for a while run two versions; one that is missing takes its default, or is an error.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from megatrain.contracts.errors import CoordinationError

SCHEMA_VERSION = 1
FORMER_NAME = "former_name"
"""In a field's metadata: what it was called before; under that name it is read too."""
_MAX_SHOWN = 80
_TOO_LARGE = 2**63

RecordType = TypeVar("RecordType")


def encode(record: Any) -> bytes:
    """Return a record's JSON, with the schema version and without the fields that have their default value."""
    plain = to_plain(record)
    for field in fields(record):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if default is not MISSING and plain[field.name] == to_plain(default):
            del plain[field.name]
    return json.dumps({"schema_version": SCHEMA_VERSION, **plain}, separators=(",", ":")).encode()


def decode(kind: type[RecordType], raw: bytes | str, place: str) -> RecordType:
    """Return the record of class `kind` that `raw` holds; `place` is the key or file, for errors.

    Raises: CoordinationError naming place and field, for anything but a record of this kind and schema version.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CoordinationError(f"{place}: not JSON ({error}); somebody else wrote it, or damaged it") from error
    if not isinstance(value, dict):
        raise CoordinationError(f"{place}: a {type(value).__name__}, expected a JSON object")
    found = value.get("schema_version")
    if found != SCHEMA_VERSION or isinstance(found, bool):
        raise CoordinationError(
            f"{place}: schema_version={found!r}, this program reads {SCHEMA_VERSION}; use one version on all hosts"
        )
    return from_plain(kind, value, place)


def to_plain(value: Any) -> Any:
    """Return what json can write of a record or of anything that may be in one."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value


def from_plain(kind: type[RecordType], value: Mapping[str, Any], place: str) -> RecordType:
    """Return the record of class `kind` whose fields a JSON object holds.

    Raises: CoordinationError naming place and field.
    """
    found: dict[str, Any] = {}
    plain_kind: Any = kind
    for field, wanted in _fields(plain_kind):
        name = field.name if field.name in value else field.metadata.get(FORMER_NAME, field.name)
        if name in value:
            held = value[name]
            # most are scalars of the very type: said at once, for there are thousands of records in a look at a job
            found[field.name] = held if _fits(wanted, held) else _read(wanted, held, f"{place}: {field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise CoordinationError(f"{place}: {field.name} is missing from a {kind.__name__}")
    try:
        return kind(**found)
    except ValueError as error:  # a rule that the record itself checks
        raise CoordinationError(f"{place}: {error}") from error


@cache
def _fields(kind: type[Any]) -> tuple[tuple[Field[Any], Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field, hints[field.name]) for field in fields(kind))


def _fits(wanted: Any, value: Any) -> bool:
    """Whether a value may be taken as it is: a scalar of just this type, and in range."""
    if type(value) is not wanted:
        return False
    if wanted is str:
        return bool(value.isascii())
    return wanted is bool or (wanted in (int, float) and -_TOO_LARGE < value < _TOO_LARGE)


def _read(wanted: Any, value: Any, place: str) -> Any:
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        choices = [choice for choice in get_args(wanted) if choice is not type(None)]
        if value is None and len(choices) < len(get_args(wanted)):
            return None
        (wanted,) = choices  # a record has no other unions
        origin = get_origin(wanted)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(place, value, "a list")
        return tuple(_read(get_args(wanted)[0], item, f"{place}[{number}]") for number, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _wrong(place, value, "an object")
        return {
            _read_scalar(str, key, place): _read(get_args(wanted)[1], item, f"{place}.{key}")
            for key, item in value.items()
        }
    if is_dataclass(wanted):
        if not isinstance(value, dict):
            raise _wrong(place, value, "an object")
        record_kind: Any = wanted
        return from_plain(record_kind, value, place)
    return _read_scalar(wanted, value, place)


def _read_scalar(wanted: Any, value: Any, place: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is float and is_number and -_TOO_LARGE < value < _TOO_LARGE:  # NaN passes no comparison
        return float(value)
    if wanted is int and is_number and isinstance(value, int) and -_TOO_LARGE < value < _TOO_LARGE:
        return value
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is str and isinstance(value, str):
        if _is_text(value):
            return value
        raise _wrong(place, value, "text: it holds a half of a surrogate pair, which cannot be written")
    if isinstance(wanted, type) and issubclass(wanted, StrEnum):
        try:
            return wanted(value)
        except ValueError:
            raise _wrong(place, value, f"one of {', '.join(wanted)}") from None
    raise _wrong(place, value, {float: "a number", int: "an integer", bool: "true or false"}.get(wanted, "a string"))


def _is_text(value: str) -> bool:
    """JSON may say what no encoding can; in a key, a file name or on a terminal that would be a surprise."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong(place: str, value: Any, rule: str) -> CoordinationError:
    shown = repr(value)
    shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
    return CoordinationError(f"{place}={shown}; expected {rule}")
