"""A container of arrays for the page: "MTA1", the length of a JSON header, the header, the arrays.

The header's `arrays` give the place of each array; its other fields belong to the picture. Arrays begin on multiples of
8 bytes, so that a browser can use them in place, without a copy. The byte order is little endian, as on every machine
that browsers run on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MTA1"
_ALIGNMENT = 8
_DTYPES: dict[str, np.dtype[Any]] = {
    "u1": np.dtype("<u1"),
    "i4": np.dtype("<i4"),
    "f4": np.dtype("<f4"),
    "f8": np.dtype("<f8"),
}
_LENGTH_BYTES = 4


def pack(fields: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the container. `fields` are JSON; every name except `arrays` is allowed.

    Raises: ValueError for an array of a type that is not u1, i4, f4 or f8, and for a field that JSON cannot hold.
    """
    if "arrays" in fields:
        raise ValueError("arrays: this name is reserved by the container; use another name")
    listed, parts, offset = [], [], 0
    for name, array in arrays.items():
        dtype = _dtype_name(name, array)
        body = np.ascontiguousarray(array, dtype=_DTYPES[dtype]).tobytes()
        listed.append({"name": name, "dtype": dtype, "shape": list(array.shape), "offset": offset, "bytes": len(body)})
        padding = -len(body) % _ALIGNMENT
        parts += [body, b"\0" * padding]
        offset += len(body) + padding
    header = json.dumps({**fields, "arrays": listed}, separators=(",", ":"), allow_nan=False).encode()
    header += b" " * (-(len(MAGIC) + _LENGTH_BYTES + len(header)) % _ALIGNMENT)
    return b"".join([MAGIC, len(header).to_bytes(_LENGTH_BYTES, "little"), header, *parts])


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the fields and arrays of a container, for programs in Python. Raises: ValueError for anything else."""
    begin = len(MAGIC) + _LENGTH_BYTES
    if body[: len(MAGIC)] != MAGIC or len(body) < begin:
        raise ValueError(f"these {len(body)} bytes are not a container of arrays, which begins with {MAGIC.decode()}")
    length = int.from_bytes(body[len(MAGIC) : begin], "little")
    fields: dict[str, Any] = json.loads(body[begin : begin + length])
    arrays: dict[str, NDArray[Any]] = {}
    for array in fields.pop("arrays"):
        first = begin + length + array["offset"]
        flat = np.frombuffer(body[first : first + array["bytes"]], dtype=_DTYPES[array["dtype"]])
        arrays[array["name"]] = flat.reshape(array["shape"])
    return fields, arrays


def _dtype_name(name: str, array: NDArray[Any]) -> str:
    found = f"{array.dtype.kind}{array.dtype.itemsize}"
    if found not in _DTYPES:
        raise ValueError(f"{name}: an array of {array.dtype}; pages can read {', '.join(_DTYPES)}")
    return found
