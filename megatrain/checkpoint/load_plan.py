"""Plan a load: which items of a checkpoint a rank needs, what to copy from each, and which rank of a group reads it.

Items are boxes of the layout that saved; wanted boxes are those of the layout that loads. Their intersections are
copied, and every wanted element must come from exactly one item. In a replica group, one rank reads an item from
storage and sends it to the others that need it. Pure functions: every rank computes the same from the same metadata.
Source: the grouped reading of MegaScale sec. 4.4.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatrain.checkpoint.box_cover import first_gap, first_overlap, region_text, sweep_dim
from megatrain.checkpoint_format.stored_tensors import StoredItem, StoredTensor
from megatrain.contracts.errors import CheckpointError
from megatrain.parallel.boxes import Box, shared_box

NO_READER = -1


@dataclass(frozen=True, slots=True)
class WantedBox:
    """A box of a tensor that a rank has to fill."""

    key: str
    global_shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class CopyRegion:
    """The region of an item that is copied to a wanted box: wanted_box[target] = item_tensor[source]."""

    wanted: int
    """Index of the wanted box."""
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class ItemRead:
    """An item to read. `number` is its index in the catalog, the same on all ranks."""

    number: int
    key: str
    item: StoredItem
    copies: tuple[CopyRegion, ...]


class ItemCatalog:
    """The numbered items of a checkpoint; finds those that a box needs."""

    def __init__(self, tensors: Mapping[str, StoredTensor], location: str, manifest_name: Callable[[], str]) -> None:
        """`location` and `manifest_name`: the checkpoint and its manifest in errors."""
        self.location, self._manifest_name = location, manifest_name
        self.items = tuple(item for tensor in tensors.values() for item in tensor.items)
        self._tensors = tensors
        self._first_number: dict[str, int] = {}
        self._indexes: dict[str, _BoxIndex] = {}
        number = 0
        for key, tensor in tensors.items():
            self._first_number[key] = number
            number += len(tensor.items)

    def shared(self, wanted: WantedBox) -> list[tuple[int, Box]]:
        """Return (item number, intersection) for all items that a wanted box needs; intersections partition the box.

        Raises: CheckpointError naming the tensor and the region.
        """
        index = self._index_of(wanted)
        found = list(index.shared(wanted.box))
        parts = [box for _, box in found]
        overlap = first_overlap(parts)
        if overlap is not None:
            one, other = (self.items[found[number][0]] for number in overlap)
            raise CheckpointError(
                f"{self.location}: {wanted.key}{region_text(parts[overlap[0]])} is in {one.file} at {one.offset} and "
                f"again, in part, in {other.file} at {other.offset}; each element is saved once: use another checkpoint"
            )
        gap = first_gap(wanted.box, parts)
        if gap is not None:
            raise CheckpointError(
                f"{self.location}: {wanted.key}{region_text(gap)} is in none of its files; the checkpoint is "
                "incomplete: use another one"
            )
        return found

    def tensor(self, key: str) -> StoredTensor:
        """Return a tensor of the checkpoint. Raises: CheckpointError naming it, if there is none."""
        tensor = self._tensors.get(key)
        if tensor is None:
            raise CheckpointError(
                f"{self.location} holds no tensor {key}; its model differs from this configuration: compare its "
                f"{self._manifest_name()}"
            )
        return tensor

    def _index_of(self, wanted: WantedBox) -> _BoxIndex:
        key = wanted.key
        tensor = self.tensor(key)
        if tuple(tensor.shape) != wanted.global_shape:
            raise CheckpointError(
                f"{self.location}: {key} has shape {tuple(tensor.shape)}, and this configuration requires "
                f"{wanted.global_shape}; use the [model] section of its {self._manifest_name()}"
            )
        if key not in self._indexes:
            boxes = [Box(item.offsets, item.sizes) for item in tensor.items]
            self._indexes[key] = _BoxIndex(boxes, self._first_number[key])
        return self._indexes[key]


class _BoxIndex:
    """Finds the intersections of a box with many boxes, sorted along one dim with the running maximum of their ends."""

    def __init__(self, boxes: Sequence[Box], first_number: int) -> None:
        self._dim = sweep_dim(boxes)
        self._is_scalar = not boxes or not boxes[0].offsets
        numbered = [(box, first_number + number) for number, box in enumerate(boxes)]
        if not self._is_scalar:
            numbered.sort(key=lambda entry: entry[0].offsets[self._dim])
            self._starts = [box.offsets[self._dim] for box, _ in numbered]
            self._furthest_ends = list(
                accumulate((box.offsets[self._dim] + box.sizes[self._dim] for box, _ in numbered), max)
            )
        self._numbered = numbered

    def shared(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        first, last = 0, len(self._numbered)
        if not self._is_scalar:
            start = wanted.offsets[self._dim]
            first = bisect_right(self._furthest_ends, start)
            last = bisect_left(self._starts, start + wanted.sizes[self._dim])
        for box, number in self._numbered[first:last]:
            shared = shared_box(box, wanted)
            if shared is not None:
                yield number, shared


def plan_load(wanted: Sequence[WantedBox], catalog: ItemCatalog) -> tuple[ItemRead, ...]:
    """Return the items that fill the wanted boxes, each once, sorted by file and offset so that files are read forward.

    Raises: CheckpointError naming the tensor, and the region that no item or more than one holds.
    """
    copies: dict[int, list[CopyRegion]] = defaultdict(list)
    keys: dict[int, str] = {}
    for position, wanted_box in enumerate(wanted):
        for number, shared in catalog.shared(wanted_box):
            item = catalog.items[number]
            copies[number].append(
                CopyRegion(position, shared.slices(item.offsets), shared.slices(wanted_box.box.offsets))
            )
            keys[number] = wanted_box.key
    reads = [ItemRead(number, keys[number], catalog.items[number], tuple(copies[number])) for number in copies]
    return tuple(sorted(reads, key=lambda read: (read.item.file, read.item.offset)))


def assign_readers(needs: Sequence[Collection[int]], item_lengths: Sequence[int]) -> tuple[int, ...]:
    """Return for each item the rank of a replica group that reads it, NO_READER for an item that no rank needs.

    needs: item numbers by rank of the group. A rank reads the items that only it needs. Of the others, largest first,
    each goes to the rank with the fewest bytes to read among those that need it. The result is the same on every rank.
    """
    ranks_by_item: dict[int, list[int]] = defaultdict(list)
    for rank, numbers in enumerate(needs):
        for number in set(numbers):
            ranks_by_item[number].append(rank)
    readers = [NO_READER] * len(item_lengths)
    load_bytes = [0] * len(needs)
    # items without a choice of reader first, so that the others can balance the load
    for number in sorted(
        ranks_by_item, key=lambda number: (len(ranks_by_item[number]) > 1, -item_lengths[number], number)
    ):
        reader = min(ranks_by_item[number], key=lambda rank: (load_bytes[rank], rank))
        readers[number] = reader
        load_bytes[reader] += item_lengths[number]
    return tuple(readers)
