"""Combine the item lists of all ranks into the description of a whole checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatrain.checkpoint.box_cover import first_gap, first_overlap, region_text
from megatrain.checkpoint.image import ItemsJson
from megatrain.checkpoint_format.stored_tensors import StoredItem, StoredTensor, StoredTensors
from megatrain.contracts.errors import CheckpointError
from megatrain.parallel.boxes import Box


@dataclass(slots=True)
class _Gathered:
    """The items of a tensor, each with its rank. `reported_by`: the first rank that reported shape and dtype."""

    shape: tuple[int, ...]
    dtype: str
    reported_by: int
    items: list[tuple[int, StoredItem]] = field(default_factory=list)


def stored_by_ranks(items_by_rank: Mapping[int, ItemsJson], file_name_of: Callable[[int], str]) -> StoredTensors:
    """Return the content of all ranks' data files. Tensors are sorted by name, items by offsets.

    Raises: CheckpointError naming the tensor when ranks disagree about its shape or dtype, when two items share an
    element (exactly one rank owns each element), or when an element is in no item.
    """
    gathered: dict[str, _Gathered] = {}
    for rank, items in items_by_rank.items():
        file = file_name_of(rank)
        for key, shape, offsets, sizes, dtype, offset, length in items:
            tensor = gathered.setdefault(key, _Gathered(tuple(shape), dtype, rank))
            if (tensor.shape, tensor.dtype) != (tuple(shape), dtype):
                raise CheckpointError(
                    f"{key} is {tensor.dtype} of shape {tensor.shape} on rank {tensor.reported_by} but {dtype} of "
                    f"shape {tuple(shape)} on rank {rank}; all ranks must run the same configuration"
                )
            tensor.items.append((rank, StoredItem(tuple(offsets), tuple(sizes), file, offset, length)))
    tensors = {}
    for key in sorted(gathered):
        tensor = gathered[key]
        tensor.items.sort(key=lambda entry: (entry[1].offsets, entry[0]))
        _check_cover(key, tensor.shape, tensor.items)
        tensors[key] = StoredTensor(key, tensor.dtype, tensor.shape, tuple(item for _, item in tensor.items))
    return StoredTensors(tensors)


def _check_cover(key: str, shape: tuple[int, ...], items: Sequence[tuple[int, StoredItem]]) -> None:
    boxes = [Box(item.offsets, item.sizes) for _, item in items]
    overlap = first_overlap(boxes)
    if overlap is not None:
        (one, first), (other, second) = ((items[number][0], boxes[number]) for number in overlap)
        raise CheckpointError(
            f"{key}{region_text(first)} of rank {one} and {region_text(second)} of rank {other} overlap; each element "
            "is saved by one rank alone"
        )
    gap = first_gap(Box((0,) * len(shape), shape), boxes)
    if gap is not None:
        raise CheckpointError(f"{key}{region_text(gap)} is saved by no rank; each element is saved by one rank")
