"""Splits items to be written into parts, and decides which file is written next when one process writes several.

The parts of an item are consecutive in its data, and each needs only few stored items. An item of the new layout may
overlap with many stored items: if tensor parallelism shards another dim, it contains a slice of each. The item is split
where stored items begin and end, so each part needs only one or a few of them.

Each file is a sequence of parts, and each part needs some stored items. A part waits until every file that still needs
its stored items has reached a part that needs them. Then these files are written in turn while the stored items are in
memory. So a stored item is read once, no matter how many files need it, and memory holds only the stored items of the
current parts. If two files need stored items in opposite orders, each would wait for the other. Then one of them goes
first, and a stored item may be read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
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

    An item is a single part if the stored items that it needs have at most `max_bytes` together.
    Raises: CheckpointError naming the tensor.
    """
    box = Box(item.offsets, item.sizes)
    needed = reader.needed_items(item.key, item.global_shape, box)
    stored = {number: Box(needed_item.offsets, needed_item.sizes) for number, needed_item in needed.items()}
    is_whole = sum(needed_item.length for needed_item in needed.values()) <= max_bytes
    for part in [box] if is_whole else bands(box, list(stored.values())):
        needs = frozenset(number for number, stored_box in stored.items() if shared_box(stored_box, part) is not None)
        yield Part(item, part, needs)


def bands(box: Box, stored: Sequence[Box]) -> Iterator[Box]:
    """Yield pieces of `box`, cut where stored boxes begin and end. Each piece is contiguous in the row-major box."""
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if dim is None:
        yield box
        return
    first, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    inside = [stored_box for stored_box in stored if shared_box(stored_box, box) is not None]
    edges = {
        edge
        for stored_box in inside
        for edge in (stored_box.offsets[dim], stored_box.offsets[dim] + stored_box.sizes[dim])
    }
    for start, stop in pairwise(sorted({first, end, *(edge for edge in edges if first < edge < end)})):
        offsets = (*box.offsets[:dim], start, *box.offsets[dim + 1 :])
        part = Box(offsets, (*box.sizes[:dim], stop - start, *box.sizes[dim + 1 :]))
        if stop - start > 1:
            yield part
        else:
            yield from bands(part, inside)


class WriteOrder:
    """Chooses the file to write next, by the stored items that its next part needs."""

    def __init__(self, needs: Sequence[Sequence[Collection[int]]]) -> None:
        """needs[file][part]: the numbers of the stored items that a part needs, with the parts in order."""
        self._needs = needs
        self._at = [0] * len(needs)
        self._last = 0
        self._num_uses: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        """By item and file: how many of the file's parts still need the item."""
        for file, parts in enumerate(needs):
            for numbers in parts:
                for number in numbers:
                    self._num_uses[number][file] += 1

    def take(self, is_kept: Callable[[int], bool]) -> int | None:
        """Return the index of the file whose next part must be written now, or None when all parts are written.

        is_kept: returns whether an item is in memory.
        """
        num_files = len(self._needs)
        # begin with the file of the last turn, so that consecutive parts of a file are written together
        order = [(self._last + step) % num_files for step in range(num_files)]
        waiting = [file for file in order if self._at[file] < len(self._needs[file])]
        if not waiting:
            return None
        file = self._most_ready(waiting, is_kept)
        self._finish(file)
        return file

    def _most_ready(self, waiting: Sequence[int], is_kept: Callable[[int], bool]) -> int:
        for file in waiting:
            if all(map(is_kept, self._next(file))):
                return file
        for file in waiting:
            if self._is_met(file, is_kept):
                return file
        return waiting[0]

    def _next(self, file: int) -> Collection[int]:
        return self._needs[file][self._at[file]]

    def _is_met(self, file: int, is_kept: Callable[[int], bool]) -> bool:
        """Return whether all files that still need an item of this file's next part need it in their next part too.

        Items in memory are not considered.
        """
        return all(
            number in self._next(other)
            for number in self._next(file)
            if not is_kept(number)
            for other in self._num_uses[number]
        )

    def _finish(self, file: int) -> None:
        for number in self._next(file):
            uses = self._num_uses[number]
            uses[file] -= 1
            if not uses[file]:
                del uses[file]
        self._at[file] += 1
        self._last = file
