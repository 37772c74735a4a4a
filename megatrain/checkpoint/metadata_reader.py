"""Which tensors a torch distributed checkpoint holds, and in which bytes of which file: `.metadata` without torch.

`.metadata` is a pickle, so whoever can write it can run anything in the process that unpickles it. Here it is read as
data (symbolic_pickle.py), in the forms that torch >= 2.11 writes, and checked before anybody sizes memory or opens
files by it: boxes lie inside their tensor and have as many elements, items are long enough for their boxes, files are
inside the checkpoint. That no two boxes overlap is checked where they are read (load_plan.py). Left out: planner_data
(where keys were in a nested state dict) and storage_meta. The counterpart, with torch's classes, is metadata_file.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from megatrain.checkpoint.symbolic_pickle import Made, Name, Table, read_symbolic_pickle, shown
from megatrain.contracts.checkpoint_files import METADATA_NAME
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.location import Location, is_relative_name

MAX_METADATA_BYTES = 256 * 2**20
"""Four times what 12,288 ranks with 36 boxes each need. What is made of a file takes up to 64 times its bytes."""
DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "complex32", "int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **{f"{sign}int{num_bits}": 1 for sign in ("", "u") for num_bits in range(1, 8)},
    "complex128": 16,
}
"""Bytes of one element, by the name that torch gives the dtype after "torch."."""

_MAX_DIMS = 64
_MAX_KEY_LENGTH = 4096
_MAX_PATH_LENGTH = 1024
_MAX_FIELDS = 16
_TOO_LARGE = 2**63

_METADATA = "torch.distributed.checkpoint.metadata"
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


def _named(module: str, *names: str) -> dict[tuple[str, str], Name]:
    return {(module, name): Name(module, name) for name in names}


_NAMES: Mapping[tuple[str, str], Name] = {
    **_named(_METADATA, "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    **_named(_METADATA, "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    **_named("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    **_named("torch", "Size", *DTYPE_BYTES),
    **_named("torch.serialization", "_get_layout"),
    # Python 3.11.0 to 3.11.3 pickle the member of an enumeration as getattr(class, name).
    **_named("builtins", "getattr"),
    # The path that was given to dcp.save, in storage_meta; Python 3.13 moved the classes.
    **_named("pathlib", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    **_named("pathlib._local", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}
_TENSOR = _NAMES[_METADATA, "TensorStorageMetadata"]
_BYTES = _NAMES[_METADATA, "BytesStorageMetadata"]
_CHUNK = _NAMES[_METADATA, "ChunkStorageMetadata"]
_PROPERTIES = _NAMES[_METADATA, "TensorProperties"]
_INDEX = _NAMES[_METADATA, "MetadataIndex"]
_MEMORY_FORMAT = _NAMES[_METADATA, "_MEM_FORMAT_ENCODING"]
_INFO = _NAMES["torch.distributed.checkpoint.filesystem", "_StorageInfo"]
_SIZE = _NAMES["torch", "Size"]
_GET_LAYOUT = _NAMES["torch.serialization", "_get_layout"]
_GETATTR = _NAMES["builtins", "getattr"]
_METADATA_NOTES = ("planner_data", "storage_meta", "version")
"""Fields of Metadata that say nothing about where tensors are."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One box of a tensor, and the bytes of `file` that hold it. `file` is relative to the checkpoint's directory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor and the boxes that it was saved in. `dtype` is torch's name without "torch."."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    items: tuple[StoredItem, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """An entry that is no tensor: a pickle of something, which nothing here ever loads."""

    key: str
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Everything that a checkpoint holds, by key."""

    tensors: Mapping[str, StoredTensor]
    byte_entries: Mapping[str, StoredBytes]

    def ranges_by_file(self) -> dict[str, list[tuple[int, int]]]:
        """Return (offset, length) of everything stored, by file, in the order of the offsets."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for tensor in self.tensors.values():
            for item in tensor.items:
                ranges.setdefault(item.file, []).append((item.offset, item.length))
        for entry in self.byte_entries.values():
            ranges.setdefault(entry.file, []).append((entry.offset, entry.length))
        return {file: sorted(found) for file, found in sorted(ranges.items())}


def load_metadata(directory: Location, name: str = METADATA_NAME) -> StoredTensors:
    """Read what a checkpoint directory holds, by the file of this name.

    Raises: CheckpointError naming the file; its MissingFileError when there is no `.metadata`.
    """
    location = directory / name
    num_bytes = location.size()
    if num_bytes is None:
        raise MissingFileError(f"{location}: not there; {directory} is no torch distributed checkpoint")
    _check_size(num_bytes, str(location))
    return read_metadata(location.read(), str(location))


def read_metadata(raw: bytes, place: str) -> StoredTensors:
    """Return what the bytes of a `.metadata` say; nothing in them is executed. `place` names the file in errors.

    Raises: CheckpointError for anything but the metadata of plain tensors, saved without torch's extensions.
    """
    _check_size(len(raw), place)
    return _Decoder(place).metadata(read_symbolic_pickle(raw, _NAMES, place))


def _check_size(num_bytes: int, place: str) -> None:
    if num_bytes > MAX_METADATA_BYTES:
        raise CheckpointError(
            f"{place}: {num_bytes} bytes, more than the {MAX_METADATA_BYTES} that are believed of metadata; it is "
            "damaged or was made up"
        )


_Index = tuple[str, tuple[int, ...] | None]
_Range = tuple[str, int, int]


class _Decoder:
    """Makes sense of the symbolic pickle. It goes down to a fixed depth, so a value that holds itself is no danger."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._paths: set[str] = set()

    def _error(self, where: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._place}: {where}: {problem}; the metadata is damaged or was made up")

    def metadata(self, root: Any) -> StoredTensors:
        required = ("state_dict_metadata", "storage_data")
        fields = self._fields(root, _NAMES[_METADATA, "Metadata"], "the whole", required, _METADATA_NOTES)
        storage = self._storage(self._table(fields["storage_data"], "storage_data"))
        tensors: dict[str, StoredTensor] = {}
        byte_entries: dict[str, StoredBytes] = {}
        for key, entry in self._table(fields["state_dict_metadata"], "state_dict_metadata").pairs:
            where = self._key(key)
            if key in tensors or key in byte_entries:
                raise self._error(where, "appears twice in state_dict_metadata")
            if isinstance(entry, Made) and entry.maker == _BYTES:
                self._fields(entry, _BYTES, where, ())
                byte_entries[key] = StoredBytes(key, *self._stored((key, None), storage, where))
            else:
                tensors[key] = self._tensor(key, entry, storage)
        if storage:
            (key, offsets), _ = storage.popitem()
            at = "" if offsets is None else f" a box at {offsets}"
            raise self._error(shown(key), f"storage_data has{at or ' bytes'} that state_dict_metadata has not")
        return StoredTensors(tensors, byte_entries)

    # Objects and their fields

    def _fields(
        self, value: Any, maker: Name, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Return the fields of a dataclass, all the `required` ones among them.

        A field that this program does not know may change what the others mean: it must be None.
        """
        if not isinstance(value, Made) or value.maker != maker:
            raise self._error(where, f"{_kind(value)}, expected a {maker.name}")
        state = value.state if value.has_state else Table()
        if value.arguments or not isinstance(state, Table) or len(state.pairs) > _MAX_FIELDS:
            raise self._error(where, f"not the form in which torch writes a {maker.name}")
        fields: dict[str, Any] = {}
        for field, found in state.pairs:
            if not isinstance(field, str) or field in fields:
                raise self._error(where, f"a {maker.name} with a field that is no text, or there twice")
            if field not in required and field not in optional and found is not None:
                raise self._error(where, f"a {maker.name} with the field {shown(field)}, which this program knows not")
            fields[field] = found
        for field in required:
            if field not in fields:
                raise self._error(where, f"a {maker.name} without the field {field}")
        return fields

    def _table(self, value: Any, where: str) -> Table:
        if not isinstance(value, Table):
            raise self._error(where, f"{_kind(value)}, expected a dict")
        return value

    def _key(self, value: Any) -> str:
        """Check a key and return how to name it in errors."""
        if not isinstance(value, str) or len(value) > _MAX_KEY_LENGTH:
            raise self._error("a key", f"{_kind(value)}, expected a text of at most {_MAX_KEY_LENGTH} characters")
        return shown(value)

    def _count(self, value: Any, where: str, what: str) -> int:
        if type(value) is not int or not 0 <= value < _TOO_LARGE:
            found = str(value) if type(value) is int else _kind(value)
            raise self._error(where, f"{what} is {found}, expected an integer of at least 0 and below 2^63")
        return value

    def _numbers(self, value: Any, where: str, what: str) -> tuple[int, ...]:
        """Return a torch.Size."""
        if isinstance(value, Made) and value.maker == _SIZE and not value.has_state:
            match value.arguments:
                case (tuple() as numbers,) if len(numbers) <= _MAX_DIMS:
                    return tuple(self._count(number, where, what) for number in numbers)
        raise self._error(where, f"{what} is {_kind(value)}, expected a Size of at most {_MAX_DIMS} numbers")

    # What is stored where

    def _storage(self, table: Table) -> dict[_Index, _Range]:
        storage: dict[_Index, _Range] = {}
        for key, value in table.pairs:
            fields = self._fields(key, _INDEX, "a key of storage_data", ("fqn",), ("index", "offset"))
            where = self._key(fields["fqn"])
            offsets = fields.get("offset")
            index = fields["fqn"], None if offsets is None else self._numbers(offsets, where, "the offset of a box")
            if index in storage:
                raise self._error(where, f"stored twice, at the offset {index[1]}")
            storage[index] = self._range(value, where)
        return storage

    def _range(self, value: Any, where: str) -> _Range:
        fields = self._fields(value, _INFO, where, ("relative_path", "offset", "length"), ("transform_descriptors",))
        if fields.get("transform_descriptors"):
            raise CheckpointError(
                f"{self._place}: {where}: its bytes were transformed by an extension of torch when they were saved; "
                "save it without extensions to read it here"
            )
        path = fields["relative_path"]
        if not isinstance(path, str) or path not in self._paths:
            self._paths.add(self._path(path, where))
        offset = self._count(fields["offset"], where, "the place in the file")
        length = self._count(fields["length"], where, "the length in the file")
        self._count(offset + length, where, "the end in the file")
        return path, offset, length

    def _path(self, path: Any, where: str) -> str:
        if not isinstance(path, str):
            raise self._error(where, f"its file is {_kind(path)}, expected a path")
        is_plain = len(path) <= _MAX_PATH_LENGTH and path.isprintable() and "\\" not in path
        if not is_plain or not is_relative_name(path):
            raise self._error(where, f"its file is {shown(path)}, expected a path inside the checkpoint directory")
        return path

    def _stored(self, index: _Index, storage: dict[_Index, _Range], where: str) -> _Range:
        """Take an entry out of `storage`: whatever is taken twice, or left in the end, does not fit."""
        try:
            return storage.pop(index)
        except KeyError:
            at = "" if index[1] is None else f" for the box at {index[1]}"
            raise self._error(where, f"storage_data has nothing{at}") from None

    # Tensors

    def _tensor(self, key: str, entry: Any, storage: dict[_Index, _Range]) -> StoredTensor:
        where = shown(key)
        fields = self._fields(entry, _TENSOR, where, ("properties", "size", "chunks"))
        dtype = self._dtype(fields["properties"], where)
        shape = self._numbers(fields["size"], where, "the shape")
        chunks = fields["chunks"]
        if not isinstance(chunks, list):
            raise self._error(where, f"its chunks are {_kind(chunks)}, expected a list")
        items: list[StoredItem] = []
        for chunk in chunks:
            box = self._fields(chunk, _CHUNK, where, ("offsets", "sizes"))
            offsets = self._numbers(box["offsets"], where, "the offset of a box")
            sizes = self._numbers(box["sizes"], where, "the size of a box")
            item = StoredItem(offsets, sizes, *self._stored((key, offsets), storage, where))
            self._check_box(item, shape, dtype, where)
            items.append(item)
        found, needed = sum(prod(item.sizes) for item in items), prod(shape)
        if found != needed:
            raise self._error(where, f"its boxes have {found} elements, the shape {shape} has {needed}")
        return StoredTensor(key, dtype, shape, tuple(items))

    def _check_box(self, item: StoredItem, shape: tuple[int, ...], dtype: str, where: str) -> None:
        at = f"the box of {item.sizes} at {item.offsets}"
        is_inside = len(item.offsets) == len(item.sizes) == len(shape) and all(
            offset + size <= end for offset, size, end in zip(item.offsets, item.sizes, shape, strict=True)
        )
        if not is_inside:
            raise self._error(where, f"{at} is not inside the shape {shape}")
        # A file must not make a reader allocate more for a box than was written of it.
        if item.length < prod(item.sizes) * DTYPE_BYTES[dtype]:
            raise self._error(where, f"{item.length} bytes are stored of {at}, which has more in {dtype}")

    def _dtype(self, properties: Any, where: str) -> str:
        """Return the dtype of TensorProperties, of which the other parts must be what a plain tensor has."""
        match properties:
            case Made(maker=maker, arguments=(), state=(Name() as dtype, layout, bool(), memory_format, bool())):
                is_plain = maker == _PROPERTIES and _is_strided(layout) and _is_memory_format(memory_format)
                if is_plain and dtype.module == "torch" and dtype.name in DTYPE_BYTES:
                    return dtype.name
        raise self._error(where, "its properties are not those of a plain (strided) tensor")


def _is_strided(value: Any) -> bool:
    match value:
        case Made(maker=maker, arguments=("torch.strided",), has_state=False):
            return maker == _GET_LAYOUT
    return False


def _is_memory_format(value: Any) -> bool:
    match value:
        case Made(maker=maker, arguments=(int() as number,), has_state=False):
            return maker == _MEMORY_FORMAT and number in range(len(_MEMORY_FORMATS))
        case Made(maker=maker, arguments=(Name() as kind, str() as name), has_state=False):
            return maker == _GETATTR and kind == _MEMORY_FORMAT and name in _MEMORY_FORMATS
    return False


def _kind(value: Any) -> str:
    """Say what a value is, for an error; the value itself may be endless."""
    if isinstance(value, Made):
        return f"a {value.maker.name}"
    if isinstance(value, Name):
        return f"the name {value}"
    names = {type(None): "None", Table: "a dict", str: "a text", int: "an integer", bool: "True or False"}
    return names.get(type(value), f"a {type(value).__name__}")
