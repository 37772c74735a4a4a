"""The bytes that torch.save writes before and after a tensor's data.

Without checksums, these bytes depend only on shape and dtype. So they are made once, and a snapshot only copies data:
prefix + data + suffix is what torch.save would have written, and torch.load reads it. torch does not verify the
checksums of a zip archive; megatrain's digests are in the checkpoint's trailers and manifest.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data
from torch.utils.serialization import config

from megatrain.checkpoint_format.item_ranges import ITEM_ALIGNMENT

_DATA_RECORD = b"archive/data/0"
_SAVE_CONFIG: Any = config
"""torch gives this module its `patch` when it is imported, so its types lack it."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes before and after the `num_data_bytes` of a contiguous tensor's data."""

    prefix: bytes
    suffix: bytes
    num_data_bytes: int

    @property
    def data_offset(self) -> int:
        return len(self.prefix)

    @property
    def num_bytes(self) -> int:
        return len(self.prefix) + self.num_data_bytes + len(self.suffix)


@cache
def envelope(shape: tuple[int, ...], dtype: torch.dtype) -> Envelope:
    """Return the envelope of a contiguous CPU tensor. The memory of the tensor's data is never read or written."""
    sink = _HollowSink()
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # no code touches its pages
    with _SAVE_CONFIG.patch({"save.compute_crc32": False, "save.storage_alignment": ITEM_ALIGNMENT}), skip_data():
        torch.save(tensor, cast("IO[bytes]", sink))
    content = bytes(sink.content)
    data_offset = _start_of_no_data(content) if sink.hole is None else sink.hole
    assert data_offset % ITEM_ALIGNMENT == 0
    assert sink.num_skipped == tensor.nbytes
    return Envelope(content[:data_offset], content[data_offset:], tensor.nbytes)


class _HollowSink:
    """A file in memory. It records the position and the length of the data that torch.save skips."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.hole: int | None = None
        self.num_skipped = 0

    def write(self, part: memoryview) -> int:
        self.content += part
        return len(part)

    def seek(self, offset: int, whence: int) -> int:
        assert whence == 1
        assert self.hole is None
        self.hole = len(self.content)
        self.num_skipped = offset
        return len(self.content) + offset

    def flush(self) -> None:
        """Do nothing: this file has no buffer, but torch.save calls this method."""


def _start_of_no_data(content: bytes) -> int:
    """Return the offset of the data of a tensor without elements, for which torch.save skips nothing."""
    name = content.index(_DATA_RECORD)
    # a zip's local header ends with the length of the padding that follows the name
    (padding,) = struct.unpack_from("<H", content, name - 2)
    return name + len(_DATA_RECORD) + int(padding)
