"""Reads from an Arrow IPC message how many rows a batch has and whether it is compressed, before it is unpacked.

Unpacking a batch also unpacks its compressed buffers, and a few bytes can unpack to a million zeros. pyarrow does not
expose these facts, so they are read here from the message's flatbuffer (Message and RecordBatch in Arrow's
format/Message.fbs): an offset leads to a table, a slot of its vtable to a field.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from megatrain.contracts.errors import DataError

_MESSAGE_HEADER_TYPE, _MESSAGE_HEADER = 1, 2
_RECORD_BATCH = 3
_BATCH_LENGTH, _BATCH_COMPRESSION = 0, 3


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Facts about a record batch from the metadata of its message; not verified."""

    num_rows: int
    is_compressed: bool


def batch_shape(metadata: pa.Buffer) -> BatchShape:
    """Read the metadata of an IPC message. Raises: DataError when it does not belong to a record batch."""
    raw = metadata.to_pybytes()
    try:
        message = _number("<I", raw, 0)
        kind = _field(raw, message, _MESSAGE_HEADER_TYPE)
        header = _field(raw, message, _MESSAGE_HEADER)
        if not kind or not header or raw[kind] != _RECORD_BATCH:
            raise DataError("an Arrow message that is not a record batch")
        batch = header + _number("<I", raw, header)
        length = _field(raw, batch, _BATCH_LENGTH)
        num_rows = _number("<q", raw, length) if length else 0
        return BatchShape(num_rows, bool(_field(raw, batch, _BATCH_COMPRESSION)))
    except (struct.error, IndexError) as error:
        raise DataError(f"a damaged Arrow message: {error}") from error


def _field(raw: bytes, table: int, slot: int) -> int:
    """Return the offset of a table's field; 0: the field is absent and has its default value."""
    vtable = table - _number("<i", raw, table)
    place = 4 + 2 * slot
    if place >= _number("<H", raw, vtable):
        return 0
    offset = _number("<H", raw, vtable + place)
    return table + offset if offset else 0


def _number(form: str, raw: bytes, place: int) -> int:
    if place < 0:
        raise IndexError(f"offset {place}")
    found: Any = struct.unpack_from(form, raw, place)[0]
    return int(found)
