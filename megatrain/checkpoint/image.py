"""The byte image of one rank's checkpoint file: where each box lies in it, and the copies that fill it and read it.

An image is items back to back, each at a multiple of 64: an archive as torch.save writes it, of one box. Where items
lie depends on the layout alone, so places, envelopes and views are made once, and a snapshot is one memcpy a box. The
copies walk the state's memory and the image forward. Nothing here knows files, slots or other ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.checkpoint.envelope import envelope
from megatrain.checkpoint.host_copy import copy_bytes
from megatrain.contracts.item_ranges import ITEM_ALIGNMENT
from megatrain.parallel.boxes import Box
from megatrain.parallel.sharding import FlatShard

MAX_ITEM_BYTES = 64 << 20
"""Data of one item. Whoever reads, verifies or sends items holds one at a time."""

ItemsJson = list[list[Any]]
"""One [key, global shape, offsets, sizes, dtype, offset, length] an item."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageItem:
    """One box and its place. Within the image: the archive at `offset`, the box's data at `data_offset`."""

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
    """Where each box of a rank's state lies in its image. Two plans of equal digest read each other's images."""

    items: tuple[ImageItem, ...]
    num_bytes: int
    digest: bytes = field(init=False)
    """SHA-256 of the items: key, shape, box, dtype and place of each."""

    def __post_init__(self) -> None:
        text = json.dumps(self.items_json(), separators=(",", ":"))
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).digest())

    def items_json(self) -> ItemsJson:
        """Return what others need to know of the items, for JSON."""
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

    def bind(self, buffer: memoryview) -> BoundImage:
        """Return the image in `buffer`, which begins at a multiple of 64 in memory and holds num_bytes or more."""
        return BoundImage(self, buffer)


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
    """An image in memory. All views are made here, so that a copy costs its bytes and about a microsecond a box.

    While it lives, the memory behind it cannot be unmapped; `release` lets go of it.
    """

    def __init__(self, plan: ImagePlan, buffer: memoryview) -> None:
        assert len(buffer) >= plan.num_bytes
        self._plan = plan
        self._bytes = np.frombuffer(buffer, dtype=np.uint8, count=plan.num_bytes)
        places = [self._bytes[item.data_offset : item.data_offset + item.tensor.nbytes] for item in plan.items]
        states = [item.tensor.detach().reshape(-1).view(torch.uint8) for item in plan.items]
        devices = {state.device for state in states}
        assert len(devices) <= 1
        self._stream: torch.cuda.Stream | None = None
        self._pairs: list[tuple[Any, Any]]
        if any(device.type == "cuda" for device in devices):
            self._stream = torch.cuda.Stream(devices.pop())
            self._pairs = [(torch.from_numpy(place), state) for place, state in zip(places, states, strict=True)]
        else:
            self._pairs = [(place, state.numpy()) for place, state in zip(places, states, strict=True)]

    def write_envelopes(self) -> None:
        """Write all that lies around the data, zeros between items included. No copy touches it again."""
        for item in self._plan.items:
            around = envelope(item.sizes, item.dtype)
            end = item.offset + item.length
            self._bytes[item.offset : item.data_offset] = np.frombuffer(around.prefix, dtype=np.uint8)
            self._bytes[end - len(around.suffix) : end] = np.frombuffer(around.suffix, dtype=np.uint8)
            self._bytes[end : _aligned(end)] = 0

    def copy_out(self) -> None:
        """Copy the state into the image, as it is after what is queued on the current stream. Returns when done."""
        self._copy(self._pairs)

    def copy_in(self) -> None:
        """Copy the image into the state, after what is queued on the current stream. Returns when done."""
        self._copy([(state, place) for place, state in self._pairs])

    def release(self) -> None:
        """Let go of the memory. The image cannot be used after it."""
        self._pairs.clear()
        del self._bytes

    def _copy(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Copy (target, source) pairs; on a device in a stream of its own, so that later work is not waited for."""
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
    """Sort by place within a storage. Which storage is known by identity: on the meta device none has an address."""
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
    """Yield the shard's box as boxes of at most max_bytes, along leading dims: each a contiguous view."""
    assert shard.box.numel > 0
    assert shard.tensor.is_contiguous()
    assert tuple(shard.tensor.shape) == shard.box.sizes
    yield from _split(shard.box, shard.tensor, 0, max(1, max_bytes // shard.tensor.element_size()))


def _split(box: Box, tensor: Tensor, dim: int, max_numel: int) -> Iterator[tuple[Box, Tensor]]:
    """Yield `box`, whose sizes are 1 before `dim`, in boxes of at most max_numel elements."""
    if box.numel <= max_numel:
        yield box, tensor
        return
    size = box.sizes[dim]
    num_rows = max(1, max_numel // math.prod(box.sizes[dim + 1 :]))
    num_rows = -(-size // -(-size // num_rows))  # as even as so many pieces can be
    for first in range(0, size, num_rows):
        rows = min(num_rows, size - first)
        offsets = (*box.offsets[:dim], box.offsets[dim] + first, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], rows, *box.sizes[dim + 1 :])
        yield from _split(Box(offsets, sizes), tensor.narrow(dim, first, rows), dim + 1, max_numel)
