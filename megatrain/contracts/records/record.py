"""Frozen dataclasses <-> JSON values in etcd: the only codec for messages of launcher, driver and command line.

A record's field types determine its content: str, int, float, bool, StrEnum, Literal, another record, tuple[X, ...],
Mapping[str, X], and each of these `| None`. Nothing is converted silently. An unknown field is skipped, because hosts
of one job may run two versions for a while. A missing field takes its default; without a default it is an error.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatrain.contracts.errors import CoordinationError
from megatrain.formatting import is_utf8

SCHEMA_VERSION = 1
_MAX_SHOWN = 80
_TOO_LARGE = 2**63
_SCALARS = frozenset((str, int, float, bool, types.NoneType))

RecordType = TypeVar("RecordType")


def encode(record: Any) -> bytes:
    """Return a record's JSON with the schema version. Its fields that have their default value are left out; records
    in its fields are written whole."""
    kind: Any = type(record)
    plain = {name: to_plain(value) for name, default in _defaults(kind) if (value := getattr(record, name)) != default}
    return json.dumps({"schema_version": SCHEMA_VERSION, **plain}, separators=(",", ":")).encode()


def decode(kind: type[RecordType], raw: bytes | str, location: str) -> RecordType:
    """Parse a record of class `kind` from `raw`; `location` is the key or file, for errors.

    Raises: CoordinationError naming location and field, unless it is a record of this kind and schema version.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CoordinationError(
            f"{location}: not JSON ({error}); it was damaged or written by another program"
        ) from error
    if not isinstance(value, dict):
        raise CoordinationError(f"{location}: a {type(value).__name__}, expected a JSON object")
    found = value.get("schema_version")
    if found != SCHEMA_VERSION or isinstance(found, bool):
        raise CoordinationError(
            f"{location}: schema_version={found!r}, this program reads {SCHEMA_VERSION}; use one version on all hosts"
        )
    return from_plain(kind, value, location)


def to_plain(value: Any) -> Any:
    """Return a record, or any value of a field, in a form that json can write."""
    # fast path: most values are scalars, and a driver encodes thousands of records
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if is_dataclass(value):
        return {name: to_plain(getattr(value, name)) for name, _ in _defaults(kind)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value


def from_plain(kind: type[RecordType], value: Mapping[str, Any], location: str) -> RecordType:
    """Return a record of class `kind` from the fields of a JSON object.

    Raises: CoordinationError naming location and field.
    """
    found: dict[str, Any] = {}
    plain_kind: Any = kind
    for field, wanted in _fields(plain_kind):
        if field.name in value:
            held = value[field.name]
            # fast path: most values are scalars of the exact type, and reading a job takes thousands of records
            found[field.name] = held if _fits(wanted, held) else _read(wanted, held, f"{location}: {field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise CoordinationError(f"{location}: {field.name} is missing from a {kind.__name__}")
    try:
        return kind(**found)
    except ValueError as error:  # raised by the record's own checks
        raise CoordinationError(f"{location}: {error}") from error


@cache
def _defaults(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the name of each field with its default value, MISSING if it has none."""
    return tuple(
        (field.name, field.default if field.default_factory is MISSING else field.default_factory())
        for field in fields(kind)
    )


@cache
def _fields(kind: type[Any]) -> tuple[tuple[Field[Any], Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field, hints[field.name]) for field in fields(kind))


def _fits(wanted: Any, value: Any) -> bool:
    """Return whether a value needs no conversion: a scalar of exactly this type, and in range."""
    if type(value) is not wanted:
        return False
    if wanted is str:
        return bool(value.isascii())
    return wanted is bool or (wanted in (int, float) and -_TOO_LARGE < value < _TOO_LARGE)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a field's type admits: `wanted`, with its origin and arguments if it is generic. is_optional: also None."""

    wanted: Any
    origin: Any
    arguments: tuple[Any, ...]
    is_optional: bool
    is_record: bool


@cache
def _shape(hint: Any) -> _Shape:
    wanted, is_optional = hint, False
    if get_origin(hint) in (Union, types.UnionType):
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
        is_optional = len(choices) < len(get_args(hint))
        (wanted,) = choices  # a record has no other unions
    return _Shape(wanted, get_origin(wanted), get_args(wanted), is_optional, is_dataclass(wanted))


def _read(hint: Any, value: Any, location: str) -> Any:
    shape = _shape(hint)
    wanted, origin, arguments = shape.wanted, shape.origin, shape.arguments
    if value is None and shape.is_optional:
        return None
    if origin is Literal:
        if value not in arguments:
            raise _wrong(location, value, f"one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(location, value, "a list")
        return tuple(_read(arguments[0], item, f"{location}[{number}]") for number, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _wrong(location, value, "an object")
        return {
            _read_scalar(str, key, location): _read(arguments[1], item, f"{location}.{key}")
            for key, item in value.items()
        }
    if shape.is_record:
        if not isinstance(value, dict):
            raise _wrong(location, value, "an object")
        return from_plain(wanted, value, location)
    return _read_scalar(wanted, value, location)


def _read_scalar(wanted: Any, value: Any, location: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is float and is_number and -_TOO_LARGE < value < _TOO_LARGE:  # comparisons with NaN are false
        return float(value)
    if wanted is int and is_number and isinstance(value, int) and -_TOO_LARGE < value < _TOO_LARGE:
        return value
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is str and isinstance(value, str):
        if is_utf8(value):
            return value
        raise _wrong(location, value, "text without lone surrogates, which UTF-8 cannot encode")
    if isinstance(wanted, type) and issubclass(wanted, StrEnum):
        try:
            return wanted(value)
        except ValueError:
            raise _wrong(location, value, f"one of {', '.join(wanted)}") from None
    raise _wrong(location, value, {float: "a number", int: "an integer", bool: "true or false"}.get(wanted, "a string"))


def _wrong(location: str, value: Any, rule: str) -> CoordinationError:
    shown = repr(value)
    shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
    return CoordinationError(f"{location}={shown}; expected {rule}")
