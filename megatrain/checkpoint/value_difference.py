"""Compute how much the values of two checkpoints of any layouts differ, one item at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.checkpoint.difference import StoredCheckpoint
from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.checkpoint_format.stored_tensors import StoredItem
from megatrain.parallel.boxes import Box

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """The number of elements whose bits differ, and their largest difference; None if a difference is not finite."""

    num_elements: int
    max_abs_difference: float | None


class ValueComparison:
    """Reads the same boxes of two checkpoints."""

    def __init__(self, before: StoredCheckpoint, after: StoredCheckpoint) -> None:
        # the boxes are items of the first checkpoint, and each is read once, so its reader keeps only the last one
        self._readers = (
            ParameterReader(before.location, before.manifest, kept_bytes=0),
            ParameterReader(after.location, after.manifest),
        )
        self._shapes = {key: tensor.shape for key, tensor in before.tensors.items()}

    def difference(self, key: str, items: Sequence[StoredItem]) -> ValueDifference:
        """Compare the boxes of some items of a tensor that has the same shape and dtype in both.

        Raises: CheckpointError naming the file or the tensor.
        """
        num_elements, largest = 0, 0.0
        for item in items:
            box = Box(item.offsets, item.sizes)
            ours, theirs = (reader.read_box(key, self._shapes[key], box) for reader in self._readers)
            is_other = _bits(ours) != _bits(theirs)
            num_other = int(is_other.sum())
            if num_other:
                num_elements += num_other
                found = (ours.reshape(-1)[is_other].double() - theirs.reshape(-1)[is_other].double()).abs().max().item()
                largest = found if math.isnan(found) else max(largest, found)
        return ValueDifference(num_elements, largest if math.isfinite(largest) else None)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
