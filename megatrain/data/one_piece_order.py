"""What orders with samples of one piece have in common: captions with their pictures, or windows of held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from megatrain.data.stretches import LengthChange
from megatrain.data.token_stream import Int64


@dataclass(frozen=True, slots=True)
class OnePieceOrder:
    """num_samples: after this many samples, the order begins again. changes: of the length of samples."""

    seed: int
    num_samples: int
    changes: tuple[LengthChange, ...] = ()

    def with_lengths(self, lengths: Sequence[LengthChange]) -> Self:
        """Return the order with these lengths. The rest of a sample after its piece is padding."""
        return replace(self, changes=tuple(lengths))

    def lengths(self, indices: Int64) -> Int64:
        """Return the number of positions of each sample. Shapes: all [N]."""
        firsts = [change.first_index for change in self.changes]
        found = np.searchsorted(firsts, indices, side="right") - 1
        return np.array([change.seq_len for change in self.changes], dtype=np.int64)[found]

    def num_assembled(self, index: int) -> int:
        """Return 0: a sample is one piece, whatever its length."""
        return 0

    def epochs_after(self, num_samples: int) -> float:
        """Return how many passes over all samples the first `num_samples` samples make."""
        return num_samples / self.num_samples
