"""The content of a checkpoint: its tensors, the boxes that each was saved in, and the file range of each box.

index_file.py writes and reads this as JSON; metadata_file.py writes it as torch's `.metadata`. `StoredTensors.problem`
checks what was read, before other code allocates memory or opens files for it. Whether boxes of a tensor overlap is
checked where they are combined (load_plan.py). MASTER and EMA are the kinds of state that can be read as weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from megatrain.checkpoint_format.location import is_relative_name

MAX_BYTES = 256 * 2**20
"""Largest index or `.metadata` to read: four times the size of the larger one for 12,288 ranks with 36 boxes each."""
MAX_DIMS = 64
TOO_LARGE = 2**63
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

_MAX_KEY_LENGTH = 4096
_MAX_PATH_LENGTH = 1024
_MAX_SHOWN = 120
"""How many characters of a file's text a message repeats."""

MASTER = "master"
"""The weights themselves, in full precision."""
EMA = "ema"
"""Their exponential moving average."""


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
class StoredTensors:
    """All tensors of a checkpoint, by key."""

    tensors: Mapping[str, StoredTensor]

    def ranges_by_file(self) -> dict[str, list[tuple[int, int]]]:
        """Return (offset, length) of all items, by file, in the order of the offsets."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for tensor in self.tensors.values():
            for item in tensor.items:
                ranges.setdefault(item.file, []).append((item.offset, item.length))
        return {file: sorted(found) for file, found in sorted(ranges.items())}

    def files(self) -> list[str]:
        """Return the names of the files that hold items, sorted."""
        return sorted({item.file for tensor in self.tensors.values() for item in tensor.items})

    def problem(self) -> str | None:
        """Return the first inconsistency, naming the key, or None. The caller has checked that no number is negative.

        The rules: keys are not too long; dtypes are torch's; boxes are inside their tensor and together have as many
        elements as the tensor; items are long enough for their boxes, so that no reader allocates more memory for a box
        than was written for it; files are inside the checkpoint's directory.
        """
        for file in self.files():
            if not _is_inside(file):
                return f"a file is {shown(file)}, expected a path inside the checkpoint directory"
        for key, tensor in self.tensors.items():
            if len(key) > _MAX_KEY_LENGTH:
                return f"the key {shown(key)} has more than {_MAX_KEY_LENGTH} characters"
            problem = _tensor_problem(tensor)
            if problem is not None:
                return f"{shown(key)}: {problem}"
        return None


def shown(text: str) -> str:
    """Return a file's text for a message: quoted, ASCII and shortened."""
    return ascii(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")


def size_problem(num_bytes: int) -> str | None:
    """Return why an index or `.metadata` of this size is too large to read, or None."""
    if num_bytes <= MAX_BYTES:
        return None
    return f"{num_bytes} bytes, more than the {MAX_BYTES} that the description of a checkpoint may have"


def _is_inside(path: str) -> bool:
    is_plain = len(path) <= _MAX_PATH_LENGTH and path.isprintable() and "\\" not in path
    return is_plain and is_relative_name(path)


def _tensor_problem(tensor: StoredTensor) -> str | None:
    shape, element_bytes = tensor.shape, DTYPE_BYTES.get(tensor.dtype)
    if element_bytes is None:
        return f"its dtype is {shown(tensor.dtype)}, which torch does not have"
    if len(shape) > MAX_DIMS:
        return f"its shape has {len(shape)} dims, expected at most {MAX_DIMS}"
    found = 0
    for item in tensor.items:
        numel = prod(item.sizes) if _is_box_of(item, shape) else -1
        at = f"the box of {item.sizes} at {item.offsets}"
        if numel < 0:
            return f"{at} is not inside the shape {shape}"
        if item.length < numel * element_bytes:
            needed_bytes = numel * element_bytes
            return f"{item.length} bytes are stored for {at}, which needs {needed_bytes} bytes in {tensor.dtype}"
        if item.offset + item.length >= TOO_LARGE:
            return f"the end in the file is {item.offset + item.length}, expected less than 2^63"
        found += numel
    needed = prod(shape)
    return None if found == needed else f"its boxes have {found} elements, and the shape {shape} has {needed}"


def _is_box_of(item: StoredItem, shape: tuple[int, ...]) -> bool:
    return len(item.offsets) == len(item.sizes) == len(shape) and all(
        offset + size <= end for offset, size, end in zip(item.offsets, item.sizes, shape, strict=True)
    )
