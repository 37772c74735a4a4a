"""The image of one rank's data file: the offset of each box, and the copies into and out of the image.

An image is a sequence of items, each at a multiple of 64. An item is one box, as an archive that torch.save would
write. The offsets of the items depend only on the layout. So offsets, envelopes and views are made once, and a snapshot
is one memcpy per box. The copies are in the order of the addresses, both in the state's memory and in the image. A
copy bypasses the CPU's caches if csrc/host_copy was compiled. Copying the tensors one by one with numpy takes up to 1.4
times as long (docs/benchmarks/checkpoint.md has both). This module accesses no files, slots or other ranks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.checkpoint.envelope import envelope
from megatrain.checkpoint_format.item_ranges import ITEM_ALIGNMENT
from megatrain.ops.extension import host_function
from megatrain.parallel.boxes import Box
from megatrain.parallel.sharding import FlatShard

_MIN_STREAMED_BYTES = 256 << 10
"""A smaller copy fits in the caches, and the call through ctypes costs more than it saves."""

Copy = Callable[[int, int, int], None]
"""(target address, source address, bytes)."""

MAX_ITEM_BYTES = 64 << 20
"""Maximum data of one item. A process that reads, verifies or sends items holds one item at a time."""

ItemsJson = list[list[Any]]
"""One [key, global shape, offsets, sizes, dtype, offset, length] per item."""


def copy_bytes(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Copy all bytes of `source` to `target`, which has the same size. Other Python threads can run meanwhile.

    Shapes: both one-dimensional and contiguous.
    """
    assert target.size == source.size
    stream = streamed_copy() if target.size >= _MIN_STREAMED_BYTES else None
    if stream is None:
        np.copyto(target, source)  # a memcpy of libc; torch's copy_ takes twice as long on small boxes
    else:
        stream(target.ctypes.data, source.ctypes.data, target.size)


@functools.cache
def streamed_copy() -> Copy | None:
    """Return the compiled copy function; None if this installation has none. numpy, which is slower, replaces it."""
    return host_function("megatrain._host_copy", "megatrain_stream_copy", [*[ctypes.c_void_p] * 2, ctypes.c_size_t])


@dataclass(frozen=True, slots=True, eq=False)
class ImageItem:
    """One box and its offset in the image: the archive begins at `offset`, the box's data at `data_offset`."""

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor
    offset: int
    length: int
    data_offset: int


@dataclass(frozen=True, slots=True, eq=False)
class ImagePlan:
    """The offset of each box of a rank's state in its image. Plans with equal digests can read each other's images."""

    items: tuple[ImageItem, ...]
    num_bytes: int
    digest: bytes = field(init=False)
    """SHA-256 of the items: key, shape, box, dtype and offset of each."""

    def __post_init__(self) -> None:
        text = json.dumps(self.items_json(), separators=(",", ":"))
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).digest())

    def items_json(self) -> ItemsJson:
        """Return the description of the items for other ranks, for JSON."""
        return [
            [
                item.key,
                list(item.global_shape),
                list(item.offsets),
                list(item.sizes),
                str(item.dtype).removeprefix("torch."),
                item.offset,
                item.length,
            ]
            for item in self.items
        ]


def plan_image(shards: Sequence[tuple[str, FlatShard]], max_item_bytes: int = MAX_ITEM_BYTES) -> ImagePlan:
    """Lay out the image of the state of one rank, given as (kind of state, shard).

    The same state gives the same plan in another process: boxes are in the order of their memory within each storage,
    storages in the order given.
    Shapes: each tensor is contiguous and has its box's sizes; no box is empty.
    """
    items = []
    end = 0
    for key, shard in _in_order_of_memory(shards):
        for box, tensor in _pieces(shard, max_item_bytes):
            around = envelope(box.sizes, tensor.dtype)
            items.append(
                ImageItem(
                    key=key,
                    global_shape=shard.global_shape,
                    offsets=box.offsets,
                    sizes=box.sizes,
                    dtype=tensor.dtype,
                    tensor=tensor,
                    offset=end,
                    length=around.num_bytes,
                    data_offset=end + around.data_offset,
                )
            )
            end = _aligned(end + around.num_bytes)
    return ImagePlan(tuple(items), end)


def key_of(kind: str, name: str) -> str:
    """Return the checkpoint's key of one kind of state of a parameter."""
    return f"model.{name}" if kind == "master" else f"optimizer.{kind}.{name}"


class BoundImage:
    """An image in memory. The constructor makes all views, so that a copy costs its bytes and about 1 us per box.

    While it lives, the memory behind it cannot be unmapped; `release` drops the views.
    """

    def __init__(self, plan: ImagePlan, buffer: memoryview) -> None:
        """buffer: begins at a multiple of 64 in memory, and holds the bytes of the image or more."""
        assert len(buffer) >= plan.num_bytes
        self._plan = plan
        self._bytes = np.frombuffer(buffer, dtype=np.uint8, count=plan.num_bytes)
        views = [self._bytes[item.data_offset : item.data_offset + item.tensor.nbytes] for item in plan.items]
        states = [item.tensor.detach().reshape(-1).view(torch.uint8) for item in plan.items]
        devices = {state.device for state in states}
        assert len(devices) <= 1
        self._stream: torch.cuda.Stream | None = None
        self._pairs: list[tuple[Any, Any]]
        if any(device.type == "cuda" for device in devices):
            self._stream = torch.cuda.Stream(devices.pop())
            self._pairs = [(torch.from_numpy(view), state) for view, state in zip(views, states, strict=True)]
        else:
            self._pairs = [(view, state.numpy()) for view, state in zip(views, states, strict=True)]

    def write_envelopes(self) -> None:
        """Write all bytes around the data, including the zeros between items. No later copy touches them."""
        for item in self._plan.items:
            around = envelope(item.sizes, item.dtype)
            end = item.offset + item.length
            self._bytes[item.offset : item.data_offset] = np.frombuffer(around.prefix, dtype=np.uint8)
            self._bytes[end - len(around.suffix) : end] = np.frombuffer(around.suffix, dtype=np.uint8)
            self._bytes[end : _aligned(end)] = 0

    def copy_out(self) -> None:
        """Copy the state into the image, after the work queued on the current stream. Returns when done."""
        self._copy(self._pairs)

    def copy_in(self) -> None:
        """Copy the image into the state, after the work queued on the current stream. Returns when done."""
        self._copy([(state, view) for view, state in self._pairs])

    def release(self) -> None:
        """Release the memory. The image cannot be used afterwards."""
        self._pairs.clear()
        del self._bytes

    def _copy(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Copy (target, source) pairs. A GPU copies in a separate stream, so this does not wait for later work."""
        if self._stream is None:
            for target, source in pairs:
                copy_bytes(target, source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ITEM_ALIGNMENT) * ITEM_ALIGNMENT


def _in_order_of_memory(shards: Sequence[tuple[str, FlatShard]]) -> list[tuple[str, FlatShard]]:
    """Sort by offset within a storage. Storages are distinguished by identity: meta-device ones have no address."""
    rank_of_storage: dict[int, int] = {}
    for _, shard in shards:
        rank_of_storage.setdefault(shard.tensor.untyped_storage()._cdata, len(rank_of_storage))
    ordered = sorted(
        shards,
        key=lambda entry: (
            rank_of_storage[entry[1].tensor.untyped_storage()._cdata],
            entry[1].tensor.storage_offset() * entry[1].tensor.element_size(),
        ),
    )
    return [(key_of(kind, shard.name), shard) for kind, shard in ordered]


def _pieces(shard: FlatShard, max_bytes: int) -> Iterator[tuple[Box, Tensor]]:
    """Split the shard's box along leading dims into boxes of at most max_bytes. Each is a contiguous view."""
    assert shard.box.numel > 0
    assert shard.tensor.is_contiguous()
    assert tuple(shard.tensor.shape) == shard.box.sizes
    yield from _split(shard.box, shard.tensor, 0, max(1, max_bytes // shard.tensor.element_size()))


def _split(box: Box, tensor: Tensor, dim: int, max_numel: int) -> Iterator[tuple[Box, Tensor]]:
    """Split `box`, whose sizes are 1 before `dim`, into boxes of at most max_numel elements."""
    if box.numel <= max_numel:
        yield box, tensor
        return
    size = box.sizes[dim]
    num_rows = max(1, max_numel // math.prod(box.sizes[dim + 1 :]))
    num_rows = -(-size // -(-size // num_rows))  # the same number of pieces, as even as possible
    for first in range(0, size, num_rows):
        rows = min(num_rows, size - first)
        offsets = (*box.offsets[:dim], box.offsets[dim] + first, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], rows, *box.sizes[dim + 1 :])
        yield from _split(Box(offsets, sizes), tensor.narrow(dim, first, rows), dim + 1, max_numel)
