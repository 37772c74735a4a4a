"""The fixed part of the header page: offsets of the fields, and functions from values to bytes and back.

It is written before the file gets its final name, and never again. encoding.py has the words that change.
"""

from __future__ import annotations

import struct
import zlib

from megatrain.contracts.black_box.encoding import (
    MAGIC,
    MAX_GROUPS,
    MAX_RECORDS,
    PAGE_BYTES,
    RECORD_BYTES,
    RING_OFFSET,
    VERSION,
    box_bytes,
)
from megatrain.contracts.black_box.values import ClockBase, Identity
from megatrain.contracts.errors import DataError, TopologyError
from megatrain.contracts.layout import SIZED_AXES, Layout

HEADER = struct.Struct("<8sIIII II I I 20s I QQQQ 128s 64s 128s")
_HEADER_CRC = struct.Struct("<I")
HEADER_FIELDS = (
    *("magic", "version", "record_bytes", "capacity", "ring_offset", "rank", "world_size", "pid", "num_axes"),
    *("unused", "num_groups_max", "round", "monotonic_ns", "unix_ns", "clock_error_ns", "job", "branch", "host"),
)
AXIS = struct.Struct("<12s I")
AXIS_FIELDS = ("name", "size")
MAX_AXES = 16
"""Entries of the list of axes, which follows the texts. The list has the axes of SIZED_AXES that the layout lists."""
CRC_OFFSET = HEADER.size + MAX_AXES * AXIS.size
_TEXT_BYTES = {"job": 128, "branch": 64, "host": 128}


def encode_header(identity: Identity, clock: ClockBase, capacity: int) -> bytes:
    """Return the fixed part of the header page.

    Raises: DataError when a name is too long for its field.
    """
    layout = identity.layout
    sizes = {axis.name: layout.size(axis.name) for axis in SIZED_AXES if axis.name in layout.axes}
    body = HEADER.pack(
        *(MAGIC, VERSION, RECORD_BYTES, capacity, RING_OFFSET),
        *(identity.rank, layout.world_size, identity.pid),
        *(len(sizes), b"", MAX_GROUPS, identity.round, clock.monotonic_ns, clock.unix_ns, clock.error_ns),
        *(_encode_text(name, getattr(identity, name)) for name in _TEXT_BYTES),
    )
    body += b"".join(AXIS.pack(name.encode(), size) for name, size in sizes.items())
    body = body.ljust(CRC_OFFSET, b"\0")
    return body + _HEADER_CRC.pack(zlib.crc32(body))


def _encode_text(name: str, text: str) -> bytes:
    raw = text.encode()
    if len(raw) > _TEXT_BYTES[name]:
        raise DataError(
            f"black box: {name} {text!r} has {len(raw)} bytes, the field holds {_TEXT_BYTES[name]}; shorten it"
        )
    return raw


def decode_header(page: bytes, location: str) -> tuple[Identity, ClockBase, int]:
    """Decode identity, clock and capacity from a header page; `location` names the file in errors.

    Raises: DataError unless it is an intact header of this version.
    """
    if page[: len(MAGIC)] != MAGIC[: len(page)]:
        raise DataError(f"{location}: starts with {page[:8]!r}, expected {MAGIC!r}; this is not a black box")
    if len(page) < PAGE_BYTES:
        raise DataError(
            f"{location}: {len(page)} bytes, a black box has at least {box_bytes(1)}; the file is truncated"
        )
    values = dict(zip(HEADER_FIELDS, HEADER.unpack_from(page), strict=True))
    version = values["version"]
    if version != VERSION:
        raise DataError(
            f"{location}: black box version {version}, this program reads version {VERSION}; use the program that "
            "wrote it"
        )
    (found,) = _HEADER_CRC.unpack_from(page, CRC_OFFSET)
    expected = zlib.crc32(page[:CRC_OFFSET])
    if found != expected:
        raise DataError(f"{location}: header checksum {found:#010x}, expected {expected:#010x}; the header is damaged")
    for name, needed in (("record_bytes", RECORD_BYTES), ("ring_offset", RING_OFFSET), ("num_groups_max", MAX_GROUPS)):
        if values[name] != needed:
            raise DataError(f"{location}: header field {name}={values[name]}, version {version} has {needed}")
    if not 1 <= values["capacity"] <= MAX_RECORDS:
        raise DataError(f"{location}: header field capacity={values['capacity']}, expected 1 to {MAX_RECORDS}")
    try:
        layout = _decode_layout(page, values["num_axes"])
        layout.coordinate(values["rank"])
        if layout.world_size != values["world_size"]:
            raise TopologyError(
                f"world_size={values['world_size']}, but its axes ({layout}) make {layout.world_size} ranks"
            )
        texts = {name: values[name].rstrip(b"\0").decode() for name in _TEXT_BYTES}
    except (TopologyError, UnicodeDecodeError) as error:
        raise DataError(f"{location}: the header is inconsistent: {error}") from error
    identity = Identity(
        job=texts["job"],
        branch=texts["branch"],
        round=values["round"],
        rank=values["rank"],
        layout=layout,
        pid=values["pid"],
        host=texts["host"],
    )
    clock = ClockBase(values["monotonic_ns"], values["unix_ns"], values["clock_error_ns"])
    return identity, clock, values["capacity"]


def _decode_layout(page: bytes, num_axes: int) -> Layout:
    if num_axes > MAX_AXES:
        raise TopologyError(f"num_axes={num_axes}, expected at most {MAX_AXES}")
    offsets = range(HEADER.size, HEADER.size + num_axes * AXIS.size, AXIS.size)
    sizes: dict[str, int] = {}
    for raw, size in (AXIS.unpack_from(page, offset) for offset in offsets):
        name = raw.rstrip(bytes(1)).decode()
        if f"{name}_size" in sizes:
            raise TopologyError(f"its list of axes has {name!r} twice")
        sizes[f"{name}_size"] = size
    layout = Layout(**sizes)
    if lacking := [axis.name for axis in SIZED_AXES if axis.is_always_listed and axis.size_name not in sizes]:
        raise TopologyError(f"its list of axes lacks {', '.join(lacking)}")
    return layout
