"""The layout of a black box: where each field is, and a record as bytes."""

from __future__ import annotations

import struct

from megatrain.contracts.black_box.encoding import NO_VALUE, RECORD
from megatrain.contracts.black_box.header_encoding import AXIS, CRC_OFFSET, HEADER, HEADER_FIELDS, MAX_AXES
from megatrain.contracts.black_box.values import Record


def field_offsets(layout: struct.Struct, names: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    """Return name -> (offset, struct code) of each field, for the documentation's table."""
    codes = layout.format.replace("<", "").replace(" ", "")
    offsets: dict[str, tuple[int, str]] = {}
    position, count = 0, ""
    remaining = iter(names)
    for character in codes:
        if character.isdigit():
            count += character
            continue
        code, count = count + character, ""
        offsets[next(remaining)] = (position, code)
        position += struct.calcsize("<" + code)
    return offsets


def header_offsets() -> dict[str, tuple[int, str]]:
    fields = field_offsets(HEADER, HEADER_FIELDS)
    return {**fields, "axes": (HEADER.size, f"{MAX_AXES * AXIS.size}s"), "crc32": (CRC_OFFSET, "I")}


def encode_record(record: Record) -> bytes:
    """Return a record's 64 bytes."""
    return RECORD.pack(
        *(record.sequence, record.start_ns, NO_VALUE if record.duration_ns is None else record.duration_ns),
        *(record.launch_ns, record.num_bytes, record.step, record.collective_sequence, record.microbatch),
        *(record.chunk, record.operation_number, record.group, record.flags, record.sequence & 0xFFFFFFFF),
    )
