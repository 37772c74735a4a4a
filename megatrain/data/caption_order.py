"""What the orders of samples with captions share: each sample has one caption, whatever the length of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from megatrain.data.stretches import LengthChange
from megatrain.data.token_stream import Int64


@dataclass(frozen=True, slots=True)
class CaptionOrder:
    """num_pictures: after as many samples, the pictures begin again. changes: of the length of samples."""

    seed: int
    num_pictures: int
    changes: tuple[LengthChange, ...] = ()

    def with_lengths(self, lengths: Sequence[LengthChange]) -> Self:
        """Return the order with these lengths. The rest of a sample after its caption is padding."""
        return replace(self, changes=tuple(lengths))

    def lengths(self, indices: Int64) -> Int64:
        """Return the number of positions of each sample. Shapes: all [N]."""
        firsts = [change.first_index for change in self.changes]
        found = np.searchsorted(firsts, indices, side="right") - 1
        return np.array([change.seq_len for change in self.changes], dtype=np.int64)[found]

    def num_assembled(self, index: int) -> int:
        """Return 0: a sample is a caption, whatever its length."""
        return 0

    def epochs_after(self, num_samples: int) -> float:
        """Return how often the pictures are shown."""
        return num_samples / self.num_pictures
