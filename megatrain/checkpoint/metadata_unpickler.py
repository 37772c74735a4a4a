"""Reads torch's `.metadata` of checkpoints without an index. It is a pickle; this reader allows only metadata in it.

The author of a pickle can make the process that unpickles it run anything, or use unlimited memory and time. So this
reader takes Python's unpickler (the one written in Python, whose steps can be replaced). It allows only the opcodes
that the metadata of torch >= 2.11 needs, torch's metadata classes by name, and calls that make a size, a layout or a
member of an enumeration. Only objects of these classes get fields, once each. Only strings and MetadataIndex may be
keys of a dict, so that no deeply nested object is hashed. The result is checked as an index is (stored_tensors.py).
The reader leaves out planner_data (where keys were in a nested state dict) and storage_meta.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import fields
from io import BytesIO
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from megatrain.checkpoint.stored_tensors import (
    DTYPE_BYTES,
    MAX_DIMS,
    TOO_LARGE,
    StoredBytes,
    StoredItem,
    StoredTensor,
    StoredTensors,
    shown,
    size_problem,
)
from megatrain.contracts.errors import CheckpointError

_MAX_FIELDS = 16
_DAMAGE = "the metadata is damaged or forged"


def read_metadata(raw: bytes, location: str) -> StoredTensors:
    """Parse the bytes of a `.metadata` file without executing anything in it. `location` names the file in errors.

    Raises: CheckpointError for anything but the metadata of plain tensors, saved without torch's extensions.
    """
    _check(size_problem(len(raw)), location)
    stored = _Decoder(location).stored(_unpickled(raw, location))
    _check(stored.problem(), location)
    return stored


def _check(problem: str | None, location: str) -> None:
    if problem is not None:
        raise CheckpointError(f"{location}: {problem}; {_DAMAGE}")


def _unpickled(raw: bytes, location: str) -> Any:
    file = BytesIO(raw)
    try:
        if not raw.startswith(pickle.PROTO):
            _refuse("is not of protocol 2 or later")
        found = _MetadataUnpickler(file).load()
        if file.tell() != len(raw):
            _refuse(f"ends, but {len(raw) - file.tell()} more bytes follow")
    except Exception as error:
        raise CheckpointError(
            f"{location}: at byte {file.tell()} the pickle {_reason(error)[:500]}; {_DAMAGE}"
        ) from error
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, _RefusedError):
        return str(error)
    if isinstance(error, EOFError | IndexError):
        return "is cut short, or pops more values than the stack holds"
    return f"cannot be read ({type(error).__name__}: {error})"


class _RefusedError(Exception):
    """What is wrong with a pickle. The text continues a sentence that begins with "the pickle"."""


def _refuse(what: str) -> NoReturn:
    raise _RefusedError(what)


def _left_out(*_: object) -> None:
    """Stand in for a path class: storage_meta holds the path that was given to dcp.save."""


_CLASSES = (
    Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties, MetadataIndex,
    StorageMeta, _StorageInfo,
)  # fmt: skip
_FIELDS = {kind: {field.name for field in fields(kind)} for kind in _CLASSES}
_NAMES: Mapping[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in (*_CLASSES, _MEM_FORMAT_ENCODING)},
    **{("torch", name): getattr(torch, name) for name in ("Size", *DTYPE_BYTES) if hasattr(torch, name)},
    ("torch.serialization", "_get_layout"): _get_layout,
    # Python 3.11.0 to 3.11.3 pickle the member of an enumeration as getattr(class, name)
    ("builtins", "getattr"): getattr,
    # Python 3.13 moved the classes
    **{
        (module, name): _left_out
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


def _called(function: Any, arguments: Any) -> Any:
    """Call one of the known functions, if the arguments have the form that they have in torch's metadata."""
    match arguments:
        case (tuple() as numbers,) if function is torch.Size and len(numbers) <= MAX_DIMS:
            if all(type(number) is int for number in numbers):
                return torch.Size(numbers)
        case (str() as name,) if function is _get_layout:
            return _get_layout(name)
        case (int() as number,) if function is _MEM_FORMAT_ENCODING:
            return _MEM_FORMAT_ENCODING(number)
        case (kind, str() as name) if function is getattr and kind is _MEM_FORMAT_ENCODING:
            return _MEM_FORMAT_ENCODING[name]
        case tuple() if function is _left_out:
            return None
    _refuse("makes a call, or passes arguments, that no checkpoint's metadata needs")


class _Opcodes(dict[int, Callable[..., None]]):
    """The handler of each opcode. An opcode that metadata does not need is refused."""

    def __missing__(self, code: int) -> NoReturn:
        names = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
        _refuse(f"has the opcode {names.get(code, f'0x{code:02x}')}, which no checkpoint's metadata needs")


class _MetadataUnpickler(pickle._Unpickler):
    """Makes Metadata from a pickle. Each `load_` method handles the opcode of its name."""

    def find_class(self, module: str, name: str) -> Any:
        known = _NAMES.get((module, name))
        if known is None:
            _refuse(f"names {shown(f'{module}.{name}')}, which is not a name that checkpoint metadata uses")
        return known

    def load_proto(self) -> None:
        version = self.read(1)[0]
        if self.proto or not 2 <= version <= pickle.HIGHEST_PROTOCOL:
            _refuse(f"declares protocol {version}, expected 2 to {pickle.HIGHEST_PROTOCOL} once, at its beginning")
        self.proto = version

    def load_frame(self) -> None:
        self.read(8)  # the frame's length, which only readers that read ahead need

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not type or kind not in _FIELDS or arguments != ():
            _refuse("creates an object of something that is not a class of checkpoint metadata")
        self.append(object.__new__(kind))

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.append(_called(function, arguments))

    def load_build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]
        known = _FIELDS.get(type(built))
        if known is None or vars(built):
            _refuse("sets fields of something that is not a new object of checkpoint metadata")
        if type(built) is TensorProperties:
            built.__setstate__(state)
            return
        if type(state) is not dict or len(state) > _MAX_FIELDS:
            _refuse(f"sets the state of a {type(built).__name__} to something other than its fields")
        for name, value in state.items():
            if name in known:
                vars(built)[name] = value
            elif value is not None:  # an unknown field may change the meaning of the others
                _refuse(
                    f"sets the field {shown(str(name))} of a {type(built).__name__}, which this program does not know"
                )

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            _refuse(f"appends to {_kind(self.stack[-1])}")
        self.stack[-1].extend(values)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, values: list[Any]) -> None:
        table = self.stack[-1]
        if type(table) is not dict or len(values) % 2:
            _refuse(f"sets items of {_kind(table)}, or a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not _is_key(key):
                _refuse(f"has a dict with the key {_kind(key)}")
            if key in table:
                _refuse(f"has a dict with a key twice: {shown(str(key))}")
            table[key] = value

    def load_stop(self) -> None:
        if len(self.stack) != 1 or self.metastack:
            _refuse("ends with more or less than one value on the stack")
        super().load_stop()

    dispatch = _Opcodes({
        code[0]: pickle._Unpickler.dispatch[code[0]]
        for code in (
            pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1,
            pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8, pickle.EMPTY_TUPLE, pickle.TUPLE1,
            pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.MARK,
            pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.GLOBAL,
            pickle.STACK_GLOBAL,
        )
    } | {
        pickle.PROTO[0]: load_proto, pickle.FRAME[0]: load_frame, pickle.NEWOBJ[0]: load_newobj,
        pickle.REDUCE[0]: load_reduce, pickle.BUILD[0]: load_build, pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends, pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems,
        pickle.STOP[0]: load_stop,
    })  # fmt: skip


def _is_key(key: Any) -> bool:
    if type(key) is MetadataIndex:
        state = vars(key)
        return type(state.get("fqn")) is str and type(state.get("offset")) in (torch.Size, type(None))
    return type(key) is str


class _Decoder:
    """Extracts StoredTensors from Metadata. The fields may hold any object that a pickle can make."""

    def __init__(self, location: str) -> None:
        self._location = location

    def _error(self, where: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._location}: {where}: {problem}; {_DAMAGE}")

    def stored(self, root: Any) -> StoredTensors:
        states, storage = self._fields(root, Metadata, "the whole", "state_dict_metadata", "storage_data")
        tensors: dict[str, StoredTensor] = {}
        byte_entries: dict[str, StoredBytes] = {}
        storage = dict(self._table(storage, "storage_data"))
        for key, entry in self._table(states, "state_dict_metadata").items():
            if type(key) is not str:
                raise self._error("a key of state_dict_metadata", f"{_kind(key)}, expected a text")
            if type(entry) is BytesStorageMetadata:
                byte_entries[key] = StoredBytes(key, *self._stored(MetadataIndex(key), storage, shown(key)))
            else:
                tensors[key] = self._tensor(key, entry, storage)
        for index in storage:
            if type(index) is not MetadataIndex:
                raise self._error("a key of storage_data", f"{_kind(index)}, expected a MetadataIndex")
            at = " bytes" if index.offset is None else f" a box at {tuple(index.offset)}"
            raise self._error(shown(index.fqn), f"storage_data has{at} that state_dict_metadata does not have")
        return StoredTensors(tensors, byte_entries)

    def _tensor(self, key: str, entry: Any, storage: dict[Any, Any]) -> StoredTensor:
        where = shown(key)
        properties, size, chunks = self._fields(entry, TensorStorageMetadata, where, "properties", "size", "chunks")
        dtype, shape = self._dtype(properties, where), self._numbers(size, where, "the shape")
        if type(chunks) is not list:
            raise self._error(where, f"its chunks are {_kind(chunks)}, expected a list")
        items = []
        for chunk in chunks:
            offsets, sizes = self._fields(chunk, ChunkStorageMetadata, where, "offsets", "sizes")
            box = self._numbers(offsets, where, "the offset of a box"), self._numbers(sizes, where, "the size of a box")
            items.append(StoredItem(*box, *self._stored(MetadataIndex(key, offsets), storage, where)))
        return StoredTensor(key, dtype, shape, tuple(items))

    def _stored(self, index: MetadataIndex, storage: dict[Any, Any], where: str) -> tuple[str, int, int]:
        """Remove an entry from `storage` and return it. A second removal, or an entry left at the end, is an error."""
        if index not in storage:
            at = "" if index.offset is None else f" for the box at {tuple(index.offset)}"
            raise self._error(where, f"storage_data has no entry{at}")
        info = storage.pop(index)
        file, offset, length = self._fields(info, _StorageInfo, where, "relative_path", "offset", "length")
        if vars(info).get("transform_descriptors"):
            raise CheckpointError(
                f"{self._location}: {where}: its bytes were transformed by an extension of torch when they were saved; "
                "save it without extensions to read it here"
            )
        if type(file) is not str:
            raise self._error(where, f"its file is {_kind(file)}, expected a path")
        return (
            file,
            self._count(offset, where, "the place in the file"),
            self._count(length, where, "the length in the file"),
        )

    def _fields(self, value: Any, kind: type, where: str, *names: str) -> list[Any]:
        if type(value) is not kind:
            raise self._error(where, f"{_kind(value)}, expected a {kind.__name__}")
        state = vars(value)
        for name in names:
            if name not in state:
                raise self._error(where, f"a {kind.__name__} without the field {name}")
        return [state[name] for name in names]

    def _table(self, value: Any, where: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise self._error(where, f"{_kind(value)}, expected a dict")
        return value

    def _count(self, value: Any, where: str, what: str) -> int:
        if type(value) is not int or not 0 <= value < TOO_LARGE:
            found = str(value) if type(value) is int else _kind(value)
            raise self._error(where, f"{what} is {found}, expected an integer of at least 0 and below 2^63")
        return value

    def _numbers(self, value: Any, where: str, what: str) -> tuple[int, ...]:
        if type(value) is not torch.Size:
            raise self._error(where, f"{what} is {_kind(value)}, expected a Size")
        return tuple(self._count(number, where, what) for number in value)

    def _dtype(self, properties: Any, where: str) -> str:
        """Return the dtype of TensorProperties, whose other fields must be those of a plain tensor."""
        names = ("dtype", "layout", "requires_grad", "pin_memory")
        if type(properties) is TensorProperties:
            dtype, layout, *flags = self._fields(properties, TensorProperties, where, *names)
            is_plain = layout is torch.strided and all(type(flag) is bool for flag in flags)
            if is_plain and type(dtype) is torch.dtype:
                return str(dtype).removeprefix("torch.")
        raise self._error(where, "its properties are not those of a plain (strided) tensor")


def _kind(value: Any) -> str:
    """Return a value's type for an error message; the value itself may be too large to print."""
    names = {type(None): "None", dict: "a dict", str: "a text", int: "an integer", bool: "True or False"}
    return names.get(type(value), f"a {type(value).__name__}")
