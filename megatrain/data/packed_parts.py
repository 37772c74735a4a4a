"""How an epoch of packed samples is divided into parts, which are read one after the other.

The bins of two lengths hold different sets of documents, but all bins of a block of packing (packing.BLOCK_DOCUMENTS)
hold the documents of this block, in any length. So a part consists of whole blocks: a change of the sample length can
begin at the next part, and each document of an epoch is still read once. The blocks of a part are from all over the
file, chosen by a keyed permutation, and are the same in all epochs.
The bins of a part are numbered from 0, block after block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from megatrain.data.bins import PackedBins
from megatrain.data.parts import EpochParts, Int64


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlocks:
    """The bins of each length, and the blocks of documents that they belong to, in the order of the parts.

    first_blocks: the first block of each part, then the number of blocks. in_file: for each length, the first bin of
    each block in the file. first_bins: the number of bins before each block in the order of the parts, then of all.
    Shapes: first_blocks [parts + 1], in_file [blocks], first_bins [blocks + 1].
    """

    bins: Mapping[int, PackedBins]
    first_blocks: Int64
    in_file: Mapping[int, Int64]
    first_bins: Mapping[int, Int64]

    @classmethod
    def whole(cls, bins: Sequence[PackedBins]) -> Self:
        """Return one part with all bins."""
        return cls._ordered(bins, np.zeros(1, np.int64), 1, [np.array([0, one.num_bins]) for one in bins])

    @classmethod
    def in_parts(cls, bins: Sequence[PackedBins], order: Int64, per_part: int) -> Self:
        """Return parts of `per_part` blocks, the last with the blocks that fill no part. order: of the blocks.

        Raises: BadTokensError when a file is damaged.
        """
        return cls._ordered(bins, order, per_part, [one.block_bounds() for one in bins])

    @classmethod
    def _ordered(cls, bins: Sequence[PackedBins], order: Int64, per_part: int, bounds: Sequence[Int64]) -> Self:
        num_parts = max(1, len(order) // per_part)
        lengths = [one.seq_len for one in bins]
        counts = [np.diff(found)[order] for found in bounds]
        return cls(
            dict(zip(lengths, bins, strict=True)),
            np.append(np.arange(num_parts) * per_part, len(order)),
            {seq_len: found[order] for seq_len, found in zip(lengths, bounds, strict=True)},
            {seq_len: np.concatenate([[0], np.cumsum(count)]) for seq_len, count in zip(lengths, counts, strict=True)},
        )

    def first_of_parts(self, seq_len: int) -> Int64:
        """Return the number of bins before each part, then of all. Shape: [parts + 1]."""
        return self.first_bins[seq_len][self.first_blocks]

    def located(self, parts: Int64, numbers: Int64, seq_len: int) -> Int64:
        """Return the bins with these numbers in their parts, by their numbers in the file. Shapes: all [N]."""
        first_bins, places = self.first_bins[seq_len], self.first_of_parts(seq_len)[parts] + numbers
        blocks = np.searchsorted(first_bins, places, side="right") - 1
        return self.in_file[seq_len][blocks] + places - first_bins[blocks]


@dataclass(frozen=True, slots=True)
class PackedParts(EpochParts):
    """The parts of an epoch that begins with packed samples of `epoch_len`. Numbers of tokens include padding."""

    blocks: PackedBlocks
    epoch_len: int

    def num_tokens_of(self, part: int, seq_len: int) -> int:
        firsts = self.blocks.first_of_parts(seq_len)
        return int(firsts[part + 1] - firsts[part]) * seq_len

    def num_tokens_from(self, part: int) -> int:
        return self.samples_from(part, self.epoch_len) * self.epoch_len

    def samples_from(self, part: int, seq_len: int) -> int:
        firsts = self.blocks.first_of_parts(seq_len)
        return int(firsts[-1] - firsts[part])

    def located(self, indices: Int64, seq_len: int, first_part: int = 0) -> tuple[Int64, Int64]:
        firsts = self.blocks.first_of_parts(seq_len)
        places = indices + firsts[first_part]
        parts = np.searchsorted(firsts[1:-1], places, side="right")
        return parts, places - firsts[parts]
