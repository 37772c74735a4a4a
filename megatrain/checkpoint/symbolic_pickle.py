"""A pickle read as data: what it says should be built, without building it.

Python's unpickler imports what a file names and calls it with what the file gives. Here nothing is imported and nothing
is called: a name stays a name, a call stays the pair of a name and its arguments, and whoever reads the result decides
what it means. Names that are not expected are refused where they stand, and so is every opcode that is not needed for
dataclasses of numbers and strings (protocols 2 to 5). Memory stays proportional to the file: no length or index in it
is trusted before the bytes are there. The interpreter is ours; the opcodes are those of Python's pickletools.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from megatrain.contracts.errors import CheckpointError

_MAX_PROTOCOL = 5
_MAX_SHOWN = 120
"""Characters of a text from the file that are repeated in a message."""
_INT32 = struct.Struct("<i")


@dataclass(frozen=True, slots=True)
class Name:
    """What a file calls module.name. It is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """An object that the file would have `maker` make of `arguments`, and then given `state`, if there is one."""

    __slots__ = ("arguments", "has_state", "maker", "state")

    def __init__(self, maker: Name, arguments: tuple[Any, ...]) -> None:
        self.maker = maker
        self.arguments = arguments
        self.state: Any = None
        self.has_state = False


class Table:
    """A dict as the pairs of the file, in order. Keys may be anything, also twice the same: nothing was hashed."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []


def shown(text: str) -> str:
    """Return a text of the file as a message repeats it: quoted, ASCII and cut short."""
    return ascii(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")


def read_symbolic_pickle(raw: bytes, names: Mapping[tuple[str, str], Name], place: str) -> Any:
    """Return what a pickle describes: None, bool, int, str, tuple, list, Name, Made or Table, and those in each other.

    A list or Table may hold itself: walk with a bound. `names` are all that may occur, by module and name; `place`
    names the file in errors.
    Raises: CheckpointError for another name, another opcode, or bytes that are no whole pickle.
    """
    return _Machine(raw, names, place).run()


class _Machine:
    """The stack, the memo, and one method an opcode."""

    def __init__(self, raw: bytes, names: Mapping[tuple[str, str], Name], place: str) -> None:
        self._raw = raw
        self._names = names
        self._place = place
        self._at = 0
        self._stack: list[Any] = []
        # A mark sets the stack aside, so that nothing after it reaches below it.
        self._below: list[list[Any]] = []
        self._memo: list[Any] = []

    def run(self) -> Any:
        raw, memo, handlers = self._raw, self._memo, _HANDLERS
        if not raw.startswith(b"\x80"):
            self._fail("does not begin as a pickle of protocol 2 or later does")
        try:
            while (code := raw[self._at]) != _STOP:
                self._at += 1
                # These make up half of a file and are done here: a call would cost more than what they do.
                if code == _MEMOIZE:
                    memo.append(self._stack[-1])
                elif code == _GET_SHORT:
                    self._stack.append(memo[raw[self._at]])
                    self._at += 1
                elif code == _GET_LONG:
                    self._stack.append(memo[int.from_bytes(raw[self._at : self._at + 4], "little")])
                    self._at += 4
                elif (handler := handlers.get(code)) is not None:
                    handler(self)
                else:
                    self._fail(f"opcode {_opcode_name(code)}, which no checkpoint's metadata needs, is refused")
            result = self._stack.pop()
        except IndexError:
            self._fail("is cut short, or takes more from the stack than there is")
        if self._stack or self._below:
            self._fail("ends with values left on the stack")
        if self._at + 1 != len(raw):
            self._fail(f"ends, and {len(raw) - self._at - 1} more bytes follow")
        return result

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._place}: at byte {self._at} the pickle {what}; it is damaged or was made up")

    def _take(self, num_bytes: int) -> bytes:
        part = self._raw[self._at : self._at + num_bytes]
        if len(part) != num_bytes:
            self._fail(f"ends before {num_bytes} bytes that it announces")
        self._at += num_bytes
        return part

    def _take_count(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _take_line(self) -> str:
        end = self._raw.find(b"\n", self._at)
        if end < 0:
            self._fail("ends within a name")
        line = self._decoded(self._take(end - self._at))
        self._at += 1
        return line

    def _decoded(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._fail("holds a text that is not UTF-8")

    def _pop_of_kind(self, kind: type) -> Any:
        value = self._stack.pop()
        if type(value) is not kind:
            self._fail(f"has a {type(value).__name__} where a {kind.__name__} belongs")
        return value

    def _pop_to_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._below.pop()
        return found

    def _top_of_kind(self, kind: type) -> Any:
        value = self._stack[-1]
        if type(value) is not kind:
            self._fail(f"has a {type(value).__name__} where a {kind.__name__} belongs")
        return value

    # Bookkeeping

    def protocol(self) -> None:
        version = self._take_count(1)
        if self._at != 2 or not 2 <= version <= _MAX_PROTOCOL:
            self._fail(f"says protocol {version}, expected 2 to {_MAX_PROTOCOL} once, at its beginning")

    def frame(self) -> None:
        # Only a promise of how much follows, for readers that fetch ahead.
        self._take(8)

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def put_short(self) -> None:
        self._put(self._take_count(1))

    def put_long(self) -> None:
        self._put(self._take_count(4))

    def _put(self, index: int) -> None:
        # Every pickler counts up. An index of the file's choice would size our memory.
        if index != len(self._memo):
            self._fail(f"stores memo entry {index} after {len(self._memo)} others")
        self._memo.append(self._stack[-1])

    # Values

    def none(self) -> None:
        self._stack.append(None)

    def true(self) -> None:
        self._stack.append(True)

    def false(self) -> None:
        self._stack.append(False)

    def int_1(self) -> None:
        self._stack.append(self._take_count(1))

    def int_2(self) -> None:
        self._stack.append(self._take_count(2))

    def int_4(self) -> None:
        self._stack.append(_INT32.unpack(self._take(4))[0])

    def int_long(self) -> None:
        num_bytes = self._take_count(1)
        if num_bytes > 9:
            self._fail(f"holds an integer of {num_bytes} bytes, which no size or offset needs")
        self._stack.append(int.from_bytes(self._take(num_bytes), "little", signed=True))

    def text_1(self) -> None:
        self._stack.append(self._decoded(self._take(self._take_count(1))))

    def text_4(self) -> None:
        self._stack.append(self._decoded(self._take(self._take_count(4))))

    def text_8(self) -> None:
        self._stack.append(self._decoded(self._take(self._take_count(8))))

    # Containers

    def empty_tuple(self) -> None:
        self._stack.append(())

    def tuple_1(self) -> None:
        self._stack.append((self._stack.pop(),))

    def tuple_2(self) -> None:
        second, first = self._stack.pop(), self._stack.pop()
        self._stack.append((first, second))

    def tuple_3(self) -> None:
        third, second, first = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._stack.append((first, second, third))

    def tuple_marked(self) -> None:
        items = tuple(self._pop_to_mark())
        self._stack.append(items)

    def empty_list(self) -> None:
        self._stack.append([])

    def append(self) -> None:
        value = self._stack.pop()
        self._top_of_kind(list).append(value)

    def append_marked(self) -> None:
        values = self._pop_to_mark()
        self._top_of_kind(list).extend(values)

    def empty_table(self) -> None:
        self._stack.append(Table())

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._top_of_kind(Table).pairs.append((key, value))

    def set_marked(self) -> None:
        values = self._pop_to_mark()
        if len(values) % 2:
            self._fail("has a key without a value")
        self._top_of_kind(Table).pairs.extend(zip(values[::2], values[1::2], strict=True))

    # Names, and what would be made of them

    def name_of_lines(self) -> None:
        module = self._take_line()
        self._push_name(module, self._take_line())

    def name_of_stack(self) -> None:
        name = self._pop_of_kind(str)
        self._push_name(self._pop_of_kind(str), name)

    def _push_name(self, module: str, name: str) -> None:
        known = self._names.get((module, name))
        if known is None:
            self._fail(f"names {shown(f'{module}.{name}')}, which is none of the names of checkpoint metadata")
        self._stack.append(known)

    def make(self) -> None:
        arguments = self._pop_of_kind(tuple)
        self._stack.append(Made(self._pop_of_kind(Name), arguments))

    def set_state(self) -> None:
        state = self._stack.pop()
        made = self._top_of_kind(Made)
        if made.has_state:
            self._fail(f"gives a {made.maker} its state twice")
        made.state, made.has_state = state, True


def _opcode_name(code: int) -> str:
    names = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
    return names.get(code, f"0x{code:02x}")


_STOP = ord(".")
_MEMOIZE = 0x94
_GET_SHORT = ord("h")
_GET_LONG = ord("j")
_HANDLERS: Mapping[int, Callable[[_Machine], None]] = {
    0x80: _Machine.protocol,
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("q"): _Machine.put_short,
    ord("r"): _Machine.put_long,
    ord("N"): _Machine.none,
    0x88: _Machine.true,
    0x89: _Machine.false,
    ord("K"): _Machine.int_1,
    ord("M"): _Machine.int_2,
    ord("J"): _Machine.int_4,
    0x8A: _Machine.int_long,
    0x8C: _Machine.text_1,
    ord("X"): _Machine.text_4,
    0x8D: _Machine.text_8,
    ord(")"): _Machine.empty_tuple,
    0x85: _Machine.tuple_1,
    0x86: _Machine.tuple_2,
    0x87: _Machine.tuple_3,
    ord("t"): _Machine.tuple_marked,
    ord("]"): _Machine.empty_list,
    ord("a"): _Machine.append,
    ord("e"): _Machine.append_marked,
    ord("}"): _Machine.empty_table,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_marked,
    ord("c"): _Machine.name_of_lines,
    0x93: _Machine.name_of_stack,
    0x81: _Machine.make,  # NEWOBJ: a class without __init__
    ord("R"): _Machine.make,  # REDUCE: any callable
    ord("b"): _Machine.set_state,
}
