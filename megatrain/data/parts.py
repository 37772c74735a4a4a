"""How an epoch of a source is divided: into parts, which are read one after the other, and parts into blocks.

Samples are permuted within a part. So after a change of the sample length, only the part that was begun has samples of
the old length left; all later parts are dealt in the new length. A part consists of blocks from all over the epoch,
chosen by a keyed permutation, so that it represents the source whatever the order of the file is. The last part also
has the blocks that fill no part, and the tokens that fill no block.
Positions in a part count its tokens from 0, block after block. Pure functions: no I/O, nothing stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.data.permutation import permuted

Int64 = NDArray[np.int64]


class PartSizes(NamedTuple):
    """The tokens of a block, and of a part, which consists of whole blocks. Both 0: an epoch is one part and one block.

    With packing, a part has about `part_tokens` tokens, and its blocks are those of packing: block_tokens is 0.
    """

    block_tokens: int = 0
    part_tokens: int = 0


WHOLE = PartSizes()


class EpochParts(ABC):
    """The parts of an epoch, which are the same for samples of any length."""

    __slots__ = ()

    @abstractmethod
    def num_tokens_of(self, part: int, seq_len: int) -> int:
        """Return the number of tokens of a part in windows of `seq_len`, of which only the last may be shorter."""

    @abstractmethod
    def num_tokens_from(self, part: int) -> int:
        """Return the number of tokens of this part and all later ones, in samples of the length with which the epoch
        begins; 0 if there is none."""

    @abstractmethod
    def samples_from(self, part: int, seq_len: int) -> int:
        """Return how many samples of a length this part and all later ones have; only the last may be shorter."""

    @abstractmethod
    def located(self, indices: Int64, seq_len: int, first_part: int = 0) -> tuple[Int64, Int64]:
        """Return the part of each sample from `first_part` on, and its number in the part. Shapes: all [N]."""


@dataclass(frozen=True, slots=True)
class StreamParts(EpochParts):
    """The parts of an epoch that is a stream of `num_tokens` tokens.

    If it has several parts, every length divides a block.
    """

    num_tokens: int
    sizes: PartSizes

    @property
    def num_blocks(self) -> int:
        """The whole blocks of the epoch."""
        return self.num_tokens // self.sizes.block_tokens if self.sizes.block_tokens else 0

    @property
    def num_parts(self) -> int:
        return max(1, self.num_tokens // self.sizes.part_tokens) if self.sizes.part_tokens else 1

    def num_tokens_of(self, part: int, seq_len: int = 0) -> int:
        last = self.num_parts - 1
        return self.sizes.part_tokens if part < last else self.num_tokens - last * self.sizes.part_tokens

    def tokens_of(self, parts: Int64) -> Int64:
        """Return the number of tokens of each part. Shapes: all [N]."""
        last = self.num_parts - 1
        return np.where(parts < last, self.sizes.part_tokens, self.num_tokens_of(last))

    def num_tokens_from(self, part: int) -> int:
        return self.num_tokens - part * self.sizes.part_tokens if part < self.num_parts else 0

    def samples_from(self, part: int, seq_len: int) -> int:
        return -(-self.num_tokens_from(part) // seq_len)

    def located(self, indices: Int64, seq_len: int, first_part: int = 0) -> tuple[Int64, Int64]:
        per_part = self.sizes.part_tokens // seq_len
        if not per_part:
            return np.full_like(indices, first_part), indices
        parts = np.minimum(indices // per_part, self.num_parts - 1 - first_part)
        return parts + first_part, indices - parts * per_part

    def places(self, parts: Int64, positions: Int64, keys: NDArray[np.uint64]) -> Int64:
        """Return where positions of parts are in the epoch, counted from its first token. Shapes: all [N].

        keys: those of the epoch's permutation of blocks.
        """
        if not self.num_blocks:
            return positions
        block_tokens = self.sizes.block_tokens
        blocks, within = np.divmod(parts * self.sizes.part_tokens + positions, block_tokens)
        is_whole = blocks < self.num_blocks
        blocks[is_whole] = permuted(blocks[is_whole], self.num_blocks, keys[is_whole])
        return blocks * block_tokens + within
