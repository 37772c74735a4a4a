"""Geometry of the boxes of one tensor: their overlaps and gaps.

Disjoint boxes cover a box exactly when their volumes add up to its volume. So a check is one sweep and one sum, and
only the error case computes the region. The sweep runs along the dimension with the most distinct offsets.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence

from megatrain.parallel.boxes import Box, shared_box


def sweep_dim(boxes: Sequence[Box]) -> int:
    """Return the dim along which the boxes have the most distinct offsets; 0 for scalars."""
    num_dims = len(boxes[0].offsets) if boxes else 0
    return max(range(num_dims), key=lambda dim: len({box.offsets[dim] for box in boxes}), default=0)


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the indices of two boxes that share an element, None when no two do."""
    if boxes and not boxes[0].offsets:
        return (0, 1) if len(boxes) > 1 else None
    dim = sweep_dim(boxes)
    active: list[tuple[int, int]] = []  # (end along the dim, index) of boxes that reach the sweep's position
    for number in sorted(range(len(boxes)), key=lambda number: boxes[number].offsets[dim]):
        box = boxes[number]
        del active[: bisect_right(active, (box.offsets[dim], len(boxes)))]
        for _, other in active:
            if shared_box(box, boxes[other]) is not None:
                return min(number, other), max(number, other)
        insort(active, (box.offsets[dim] + box.sizes[dim], number))
    return None


def first_gap(whole: Box, parts: Sequence[Box]) -> Box | None:
    """Return a box of `whole` that no part covers, None when the parts cover all of it.

    The parts must be disjoint and lie within `whole`.
    """
    if sum(part.numel for part in parts) == whole.numel:
        return None
    uncovered = [whole]
    for part in parts:
        uncovered = [rest for box in uncovered for rest in _without(box, part)]
    return min(uncovered, key=lambda box: box.offsets)


def region_text(box: Box) -> str:
    """Return a box in index notation: `[3:5, 0:7]`."""
    ranges = (f"{first}:{first + size}" for first, size in zip(box.offsets, box.sizes, strict=True))
    return f"[{', '.join(ranges)}]"


def _without(box: Box, part: Box) -> Iterator[Box]:
    """Yield disjoint boxes that together are `box` without `part`."""
    shared = shared_box(box, part)
    if shared is None:
        yield box
        return
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (first, num) in enumerate(zip(shared.offsets, shared.sizes, strict=True)):
        end = offsets[dim] + sizes[dim]
        for start, stop in ((offsets[dim], first), (first + num, end)):
            if start < stop:
                yield Box((*offsets[:dim], start, *offsets[dim + 1 :]), (*sizes[:dim], stop - start, *sizes[dim + 1 :]))
        offsets[dim], sizes[dim] = first, num
