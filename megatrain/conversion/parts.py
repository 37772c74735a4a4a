"""Cuts an item to be written into parts. The parts are consecutive in its data, and each needs only few stored items.

An item of the new layout may overlap with many stored items: it is made of a slice of each when tensor parallelism cuts
another dim. The parts are cut where stored items begin and end, so each part needs only one or a few of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatrain.checkpoint.image import ImageItem
from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.parallel.boxes import Box, shared_box


@dataclass(frozen=True, slots=True)
class Part:
    """A box of an item. `needs`: the numbers of the stored items that it is read from."""

    item: ImageItem
    box: Box
    needs: frozenset[int]


def parts_of(item: ImageItem, reader: ParameterReader, max_bytes: int) -> Iterator[Part]:
    """Yield the parts of an item in the order of its data.

    An item stays whole if the stored items that it needs have `max_bytes` or less together.
    Raises: CheckpointError, which names the tensor.
    """
    box = Box(item.offsets, item.sizes)
    needed = reader.needed_items(item.key, item.global_shape, box)
    stored = {number: Box(one.offsets, one.sizes) for number, one in needed.items()}
    is_whole = sum(one.length for one in needed.values()) <= max_bytes
    for part in [box] if is_whole else bands(box, list(stored.values())):
        needs = frozenset(number for number, one in stored.items() if shared_box(one, part) is not None)
        yield Part(item, part, needs)


def bands(box: Box, stored: Sequence[Box]) -> Iterator[Box]:
    """Yield pieces of `box`, cut where stored boxes begin and end. Each piece is contiguous in the row-major box."""
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if dim is None:
        yield box
        return
    first, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    inside = [one for one in stored if shared_box(one, box) is not None]
    edges = {edge for one in inside for edge in (one.offsets[dim], one.offsets[dim] + one.sizes[dim])}
    for start, stop in pairwise(sorted({first, end, *(edge for edge in edges if first < edge < end)})):
        offsets = (*box.offsets[:dim], start, *box.offsets[dim + 1 :])
        part = Box(offsets, (*box.sizes[:dim], stop - start, *box.sizes[dim + 1 :]))
        if stop - start > 1:
            yield part
        else:
            yield from bands(part, inside)
