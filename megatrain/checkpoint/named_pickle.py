"""Writes pickles that refer to classes by name, so that only the reader has to import them.

The opcodes are those of protocol 4, as pickletools documents them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

_PROTOCOL = 4
_BYTE, _INT32 = 1 << 8, 1 << 31
Value: TypeAlias = (
    "str | int | bool | tuple[Value, ...] | Sequence[Value] | Mapping[str, Value] | Name | Call | New | Items | None"
)
_Repeated = TypeVar("_Repeated", str, "Name", "Call")
_TUPLES = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}


class Name(NamedTuple):  # hashed for every object that is written: a tuple has the fastest hash
    """A class or a function, by its module's name and its own."""

    module: str
    name: str


class Call(NamedTuple):
    """The result of function(argument). The reader creates one object for equal calls."""

    function: Name
    argument: str | int | tuple[int, ...]


class New(NamedTuple):
    """A new object of class `kind`. `state`: its fields, or the argument of its __setstate__."""

    kind: Name
    state: Value


@dataclass(frozen=True, slots=True)
class Items:
    """A dict. Its keys may be objects."""

    pairs: Iterable[tuple[Value, Value]]


def pickled(value: Value) -> bytes:
    """Return the pickle of `value`. Equal texts, names and calls are stored once."""
    writer = _Writer()
    writer.write(value)
    return b"".join([pickle.PROTO, bytes([_PROTOCOL]), *writer.parts, pickle.STOP])


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[Value, bytes] = {}
        self._writers: Mapping[type, Callable[..., None]] = {
            str: self._once(self._text), Name: self._once(self._name), Call: self._once(self._call),
            int: self._number, bool: self._bool, type(None): self._none, tuple: self._tuple, list: self._list,
            dict: self._dict, Items: self._items, New: self._new,
        }  # fmt: skip

    def write(self, value: Value) -> None:
        self._writers[type(value)](value)

    def _once(self, write: Callable[[_Repeated], None]) -> Callable[[_Repeated], None]:
        """Return a function that writes a value, and for an equal value later only a reference to the first one."""

        def write_once(value: _Repeated) -> None:
            known = self._memo.get(value)
            if known is not None:
                self.parts.append(known)
                return
            write(value)
            place = len(self._memo)
            is_short = place < _BYTE
            self._memo[value] = (
                pickle.BINGET + place.to_bytes(1) if is_short else pickle.LONG_BINGET + place.to_bytes(4, "little")
            )
            self.parts.append(pickle.MEMOIZE)

        return write_once

    def _text(self, value: str) -> None:
        content = value.encode("utf-8", "surrogatepass")
        self.parts += (pickle.BINUNICODE, len(content).to_bytes(4, "little"), content)

    def _name(self, value: Name) -> None:
        self.write(value.module)
        self.write(value.name)
        self.parts.append(pickle.STACK_GLOBAL)

    def _call(self, value: Call) -> None:
        self.write(value.function)
        self.write(value.argument)
        self.parts += (pickle.TUPLE1, pickle.REDUCE)

    def _number(self, value: int) -> None:
        if 0 <= value < _BYTE:
            self.parts.append(pickle.BININT1 + value.to_bytes(1))
        elif -_INT32 <= value < _INT32:
            self.parts.append(pickle.BININT + value.to_bytes(4, "little", signed=True))
        else:
            content = pickle.encode_long(value)
            self.parts.append(pickle.LONG1 + len(content).to_bytes(1) + content)

    def _bool(self, value: bool) -> None:
        self.parts.append(pickle.NEWTRUE if value else pickle.NEWFALSE)

    def _none(self, _: None) -> None:
        self.parts.append(pickle.NONE)

    def _tuple(self, values: tuple[Value, ...]) -> None:
        end = _TUPLES.get(len(values), pickle.TUPLE)
        if end == pickle.TUPLE:
            self.parts.append(pickle.MARK)
        for value in values:
            self.write(value)
        self.parts.append(end)

    def _list(self, values: Sequence[Value]) -> None:
        self.parts.append(pickle.EMPTY_LIST + pickle.MARK)
        for value in values:
            self.write(value)
        self.parts.append(pickle.APPENDS)

    def _dict(self, value: Mapping[str, Value]) -> None:
        self._pairs(value.items())

    def _items(self, value: Items) -> None:
        self._pairs(value.pairs)

    def _pairs(self, pairs: Iterable[tuple[Value, Value]]) -> None:
        self.parts.append(pickle.EMPTY_DICT + pickle.MARK)
        for key, value in pairs:
            self.write(key)
            self.write(value)
        self.parts.append(pickle.SETITEMS)

    def _new(self, value: New) -> None:
        self.write(value.kind)
        self.parts.append(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.write(value.state)
        self.parts.append(pickle.BUILD)
