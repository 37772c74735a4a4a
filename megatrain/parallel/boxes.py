"""Axis-aligned boxes of a tensor, their intersections, and the boxes that make up a flat range of a tensor.

Tensor parallelism gives each rank a box of a logical parameter; data parallelism cuts the flattened box into ranges. A
contiguous range of a row-major tensor of N dims consists of at most 2N - 1 boxes, each contiguous in memory. So a name
and a box are a complete description of a piece of optimizer state.
Source: ByteCheckpoint (arXiv:2407.20143), for the decomposition of flat ranges into boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def shifted(self, offsets: Sequence[int]) -> Box:
        return Box(tuple(a + b for a, b in zip(self.offsets, offsets, strict=True)), self.sizes)

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of this box in a tensor whose first element is at `origin`."""
        starts = [offset - first for offset, first in zip(self.offsets, origin, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


def shared_box(box: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, None when it is empty."""
    offsets = []
    sizes = []
    for offset, size, other_offset, other_size in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True):
        first = max(offset, other_offset)
        num = min(offset + size, other_offset + other_size) - first
        if num <= 0:
            return None
        offsets.append(first)
        sizes.append(num)
    return Box(tuple(offsets), tuple(sizes))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Yield the boxes that make up the flat range [start, stop) of a row-major tensor, in order.

    Yields (flat position of the box's first element, box); each box is contiguous in memory.
    """
    shape = tuple(shape)
    if not shape:
        if stop > start:
            yield start, Box((), ())
        return
    while start < stop:
        # find the outermost dim with a slice that starts at `start` and fits into the range
        stride, dim = 1, len(shape) - 1
        while dim > 0 and start % (stride * shape[dim]) == 0 and start + stride * shape[dim] <= stop:
            stride *= shape[dim]
            dim -= 1
        index = start // stride % shape[dim]
        count = min((stop - start) // stride, shape[dim] - index)
        offsets, rest = [], start
        for size in reversed(shape):
            offsets.append(rest % size)
            rest //= size
        sizes = (1,) * dim + (count,) + shape[dim + 1 :]
        yield start, Box(tuple(reversed(offsets)), sizes)
        start += count * stride
