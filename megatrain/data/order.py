"""The pieces of the token stream in sample number `cursor`: a pure function of (seed, cursor).

Without packing, each epoch divides the stream into consecutive windows of seq_len tokens, starting at an offset of the
epoch; with packing, the samples of an epoch are the bins of a file. An epoch visits them in the order of a Feistel
permutation keyed by (seed, epoch), or by (seed, epoch, part) where epochs have parts (parts.py). No order is stored:
any sample is found in O(1), so a run resumes at a cursor at once, with any number of data-parallel ranks.

The length of samples may change at any sample (length_order.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.data.bins import PackedBins
from megatrain.data.indexed import IndexedDataset
from megatrain.data.length_order import LengthOrder
from megatrain.data.packed_parts import PackedBlocks, PackedParts
from megatrain.data.packing import num_packed_blocks
from megatrain.data.parts import WHOLE, PartSizes, StreamParts
from megatrain.data.permutation import epoch_keys, mixed, permuted
from megatrain.data.stretches import LengthChange
from megatrain.data.token_stream import Int64, SamplePieces

_STREAM_OFFSET = 0
_STREAM_PERMUTATION = 1
_STREAM_BLOCKS = 2
_PART_STRIDE = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that all parts of an epoch have different keys. Part 0 has the key of the epoch."""


@dataclass(frozen=True, slots=True)
class SampleOrder(LengthOrder):
    """The order of samples over a stream of `num_tokens`; `source` names the stream in errors.

    seq_len: the length of the first samples. later: the changes of the length, ascending. sizes: those of the parts of
    an epoch; with several parts, every length divides a block.
    Raises: DataError when the stream is shorter than two windows, the minimum for an epoch with an offset.
    """

    num_tokens: int
    seq_len: int
    seed: int
    source: str = "the training data"
    sizes: PartSizes = WHOLE
    later: tuple[LengthChange, ...] = ()

    def __post_init__(self) -> None:
        longest = max(self.seq_len, *(change.seq_len for change in self.later), 0)
        if self.num_tokens < 2 * longest:
            raise DataError(
                f"{self.source}: holds {self.num_tokens} tokens, and model.seq_len={longest} needs at least "
                f"{2 * longest}; use more text or a smaller model.seq_len"
            )

    def with_lengths(self, lengths: Sequence[LengthChange]) -> Self:
        """Return the order of the same tokens with these lengths. The first one begins at index 0."""
        return replace(self, seq_len=lengths[0].seq_len, later=tuple(lengths[1:]))

    def window_starts(self, cursors: Int64) -> Int64:
        """Return the first token of each piece of these samples. Without changes of the length, a sample has one piece,
        its window: seq_len + 1 tokens, the last of which is only a label."""
        return self.pieces(cursors).starts

    def epoch_parts(self, epoch_len: int) -> StreamParts:
        """Return the parts of an epoch that begins with samples of this length. With the largest offset, epoch_len - 1,
        its windows end before the end of the stream."""
        return StreamParts((self.num_tokens - epoch_len) // epoch_len * epoch_len, self.sizes)

    def windows(self, epoch_len: int, epochs: Int64, parts: Int64, numbers: Int64, seq_len: int) -> SamplePieces:
        """Return the windows, which have one piece each."""
        parts_of_epoch = self.epoch_parts(epoch_len)
        num_tokens, keys = parts_of_epoch.tokens_of(parts), epoch_keys(self.seed, epochs)
        positions = _permuted_in_parts(keys, parts, numbers, num_tokens // seq_len) * seq_len
        offsets = mixed(keys ^ np.uint64(_STREAM_OFFSET)) % np.uint64(epoch_len)
        places = parts_of_epoch.places(parts, positions, mixed(keys ^ np.uint64(_STREAM_BLOCKS)))
        labels = np.minimum(num_tokens - positions, seq_len)
        return SamplePieces(offsets.astype(np.int64) + places, labels, np.arange(len(numbers) + 1))


@dataclass(frozen=True, slots=True)
class PackedOrder(LengthOrder):
    """The order of packed samples: each epoch has every bin once, in another order.

    sizes: those of the parts of an epoch. blocks: the packed samples of each length, in parts. After a change of the
    length, the remaining bins of the part that was begun count as windows, with their padding: samples of the new
    length are cut from them, or consist of several.
    """

    dataset: IndexedDataset
    seq_len: int
    seed: int
    sizes: PartSizes
    blocks: PackedBlocks
    later: tuple[LengthChange, ...] = ()

    @classmethod
    def of(cls, dataset: IndexedDataset, seq_len: int, seed: int, sizes: PartSizes = WHOLE) -> Self:
        """Return the order of samples of one length. Raises: DataError when the file of packed samples is unusable."""
        return cls(dataset, seq_len, seed, sizes, _in_parts([PackedBins(dataset, seq_len)], dataset, seed, sizes))

    def with_lengths(self, lengths: Sequence[LengthChange]) -> Self:
        """Return the order with these lengths. Raises: DataError when the packed samples of a length are unusable."""
        wanted = dict.fromkeys(change.seq_len for change in lengths)
        bins = [self.blocks.bins.get(seq_len) or PackedBins(self.dataset, seq_len) for seq_len in wanted]
        blocks = _in_parts(bins, self.dataset, self.seed, self.sizes)
        return replace(self, seq_len=lengths[0].seq_len, blocks=blocks, later=tuple(lengths[1:]))

    def epoch_parts(self, epoch_len: int) -> PackedParts:
        """Return the parts of an epoch of bins of this length."""
        return PackedParts(self.blocks, epoch_len)

    def windows(self, epoch_len: int, epochs: Int64, parts: Int64, numbers: Int64, seq_len: int) -> SamplePieces:
        """Return the pieces of bins. Raises: BadTokensError when the file of bins is damaged there."""
        sizes = np.diff(self.blocks.first_of_parts(seq_len))
        in_parts = _permuted_in_parts(epoch_keys(self.seed, epochs), parts, numbers, sizes[parts])
        found, bounds = self.blocks.bins[seq_len].read(self.blocks.located(parts, in_parts, seq_len))
        return SamplePieces(found["start"].astype(np.int64), found["labels"].astype(np.int64), bounds)


def _permuted_in_parts(keys: NDArray[np.uint64], parts: Int64, numbers: Int64, sizes: Int64) -> Int64:
    """Return the images of numbers under the permutations of their parts.

    A number that is not below the size of its part stays. keys: of the epochs. sizes: of the parts. Shapes: all [N].
    """
    part_keys = mixed(keys ^ np.uint64(_STREAM_PERMUTATION)) + parts.astype(np.uint64) * _PART_STRIDE
    found = numbers.copy()
    for size in np.unique(sizes[numbers < sizes]).tolist():
        chosen = (sizes == size) & (numbers < size)
        found[chosen] = permuted(numbers[chosen], size, part_keys[chosen])
    return found


def _in_parts(bins: Sequence[PackedBins], dataset: IndexedDataset, seed: int, sizes: PartSizes) -> PackedBlocks:
    """Return packed samples in parts of about `sizes.part_tokens`, the same blocks of documents for any length."""
    if not sizes.part_tokens:
        return PackedBlocks.whole(bins)
    num_blocks = num_packed_blocks(dataset.num_documents)
    keys = mixed(epoch_keys(seed, np.zeros(num_blocks, np.int64)) ^ np.uint64(_STREAM_BLOCKS))
    order = permuted(np.arange(num_blocks), num_blocks, keys)
    return PackedBlocks.in_parts(bins, order, -(-sizes.part_tokens * num_blocks // dataset.num_tokens))


def order_of(
    dataset: IndexedDataset, seq_len: int, seed: int, *, is_packed: bool, sizes: PartSizes = WHOLE
) -> SampleOrder | PackedOrder:
    """Return the order of the samples of a pair of token files. sizes: of the parts of an epoch.

    Raises: DataError when it has too few tokens, or when the file of packed samples cannot be used.
    """
    if is_packed:
        return PackedOrder.of(dataset, seq_len, seed, sizes)
    return SampleOrder(dataset.num_tokens, seq_len, seed, str(dataset.prefix), sizes)
