"""The pieces of the token stream in sample number `cursor`: a pure function of (seed, cursor).

Without packing, each epoch divides the stream into consecutive windows of seq_len tokens, starting at an offset of the
epoch; with packing, the samples of an epoch are the bins of a file. An epoch visits them in the order of a Feistel
permutation keyed by (seed, epoch), or by (seed, epoch, part) where epochs have parts (parts.py). No order is stored:
any sample is found in O(1), so a run resumes at a cursor at once, with any number of data-parallel ranks.

The length of samples may change at any sample (stretches.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.data.bins import PackedBins
from megatrain.data.indexed import IndexedDataset
from megatrain.data.parts import WHOLE, EpochParts, PartSizes
from megatrain.data.permutation import epoch_keys, mixed, permuted
from megatrain.data.stretches import LengthChange, Stretch, following
from megatrain.data.token_stream import Int64, SamplePieces

_STREAM_OFFSET = 0
_STREAM_PERMUTATION = 1
_STREAM_BLOCKS = 2
_PART_STRIDE = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that all parts of an epoch have different keys. Part 0 has the key of the epoch."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
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
                f"{self.source}: holds {self.num_tokens} tokens, model.seq_len={longest} needs at least "
                f"{2 * longest}; use more text or a smaller model.seq_len"
            )

    @property
    def samples_per_epoch(self) -> int:
        """The number of windows n of the first length. With the largest offset, seq_len - 1, they end before token
        (n + 1) * seq_len."""
        return self.epoch_parts(self.seq_len).samples_from(0, self.seq_len)

    def with_lengths(self, lengths: Sequence[LengthChange]) -> Self:
        """Return the order of the same tokens with these lengths. The first one begins at index 0."""
        return replace(self, seq_len=lengths[0].seq_len, later=tuple(lengths[1:]))

    def lengths(self, indices: Int64) -> Int64:
        """Return the number of positions of each sample. Shapes: all [N]."""
        known = [self.seq_len, *(change.seq_len for change in self.later)]
        return np.array(known, dtype=np.int64)[self._stretch_numbers(indices)]

    def num_assembled(self, index: int) -> int:
        """Return how many samples of the length that sample `index` has are put together from windows of another."""
        return _stretches(self)[int(self._stretch_numbers(np.array([index]))[0])].num_rest

    def epochs_after(self, num_samples: int) -> float:
        """Return how many passes over the stream the first samples are."""
        stretch = _stretches(self)[int(self._stretch_numbers(np.array([num_samples]))[0])]
        at = following(stretch, LengthChange(num_samples, stretch.seq_len), self.epoch_parts)
        num_tokens = self.epoch_parts(at.epoch_len or stretch.seq_len).num_tokens
        left = at.tokens_left(self.epoch_parts) if at.epoch_len else 0
        return (at.next_epoch * num_tokens - left) / num_tokens

    def window_starts(self, cursors: Int64) -> Int64:
        """Return the first token of each piece of these samples. Without changes of the length, a sample has one piece,
        its window: seq_len + 1 tokens, the last of which is only a label."""
        return self.pieces(cursors).starts

    def pieces(self, cursors: Int64) -> SamplePieces:
        """Return the pieces of each sample: its window, or parts of windows of the length before."""
        indices = np.asarray(cursors, dtype=np.int64)
        numbers = self._stretch_numbers(indices)
        found = [_NO_PIECES]
        for number in np.unique(numbers).tolist():
            found += self._pieces_within(_stretches(self)[number], np.flatnonzero(numbers == number), indices)
        owners, starts, labels = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        in_order = np.argsort(owners, kind="stable")
        bounds = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(indices)))]).astype(np.int64)
        return SamplePieces(starts[in_order], labels[in_order], bounds)

    def epoch_parts(self, epoch_len: int) -> EpochParts:
        """Return the parts of an epoch that begins with samples of this length."""
        return EpochParts((self.num_tokens - epoch_len) // epoch_len * epoch_len, self.sizes)

    def _stretch_numbers(self, indices: Int64) -> Int64:
        return np.searchsorted([change.first_index for change in self.later], indices, side="right").astype(np.int64)

    def _pieces_within(self, stretch: Stretch, owners: Int64, indices: Int64) -> list[_OwnedPieces]:
        """Return the pieces of the samples `indices[owners]` of one stretch, by what the stretch takes them from."""
        places = indices[owners] - stretch.first_index
        seq_len, num_rest, num_begun = stretch.seq_len, stretch.num_rest, stretch.num_rest + stretch.num_later
        found = []
        of_epochs = places >= num_begun
        if of_epochs.any():
            parts = self.epoch_parts(seq_len)
            epochs, within = np.divmod(places[of_epochs] - num_begun, parts.samples_from(0, seq_len))
            windows = self._windows(seq_len, epochs + stretch.next_epoch, *parts.located(within, seq_len), seq_len)
            found.append(_OwnedPieces(owners[of_epochs], *windows))
        of_later = (places >= num_rest) & ~of_epochs
        if of_later.any():
            within = places[of_later] - num_rest
            located = self.epoch_parts(stretch.epoch_len).located(within, seq_len, stretch.part)
            windows = self._windows(stretch.epoch_len, np.full_like(within, stretch.epoch), *located, seq_len)
            found.append(_OwnedPieces(owners[of_later], *windows))
        of_rest = places < num_rest
        if of_rest.any():
            found.append(self._pieces_of_rest(stretch, owners[of_rest], places[of_rest]))
        return found

    def _pieces_of_rest(self, stretch: Stretch, owners: Int64, places: Int64) -> _OwnedPieces:
        """Return the pieces of samples that are cut from the rest of a part, as windows of the length before.

        Positions count the tokens of the part in the order of these windows, of which only the last may be shorter.
        """
        old_len, parts = stretch.rest_len, self.epoch_parts(stretch.epoch_len)
        first = stretch.rest_start + places * stretch.seq_len
        end = np.minimum(first + stretch.seq_len, parts.num_tokens_of(stretch.part - 1))
        counts = (end - 1) // old_len - first // old_len + 1
        owner = np.repeat(np.arange(len(places)), counts)
        numbers = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + (first // old_len)[owner]
        epochs, of_part = np.full_like(numbers, stretch.epoch), np.full_like(numbers, stretch.part - 1)
        starts, labels = self._windows(stretch.epoch_len, epochs, of_part, numbers, old_len)
        low = np.maximum(first[owner] - numbers * old_len, 0)
        high = np.minimum(end[owner] - numbers * old_len, labels)
        return _OwnedPieces(owners[owner], starts + low, high - low)

    def _windows(
        self, epoch_len: int, epochs: Int64, parts: Int64, numbers: Int64, seq_len: int
    ) -> tuple[Int64, Int64]:
        """Return the first token and the labels of windows by their numbers in the order of a part. Shapes: all [N].

        A part whose tokens seq_len does not divide has a shorter window, the last in its order.
        """
        parts_of_epoch = self.epoch_parts(epoch_len)
        num_tokens, keys = parts_of_epoch.tokens_of(parts), epoch_keys(self.seed, epochs)
        part_keys = mixed(keys ^ np.uint64(_STREAM_PERMUTATION)) + parts.astype(np.uint64) * _PART_STRIDE
        num_full, windows = num_tokens // seq_len, numbers.copy()
        for size in np.unique(num_full[numbers < num_full]).tolist():
            chosen = (num_full == size) & (numbers < size)
            windows[chosen] = permuted(numbers[chosen], size, part_keys[chosen])
        positions = windows * seq_len
        offsets = mixed(keys ^ np.uint64(_STREAM_OFFSET)) % np.uint64(epoch_len)
        places = parts_of_epoch.places(parts, positions, mixed(keys ^ np.uint64(_STREAM_BLOCKS)))
        return offsets.astype(np.int64) + places, np.minimum(num_tokens - positions, seq_len)


class _OwnedPieces(NamedTuple):
    """Pieces, and for each the place of its sample among those that are asked for. Shapes: all [P]."""

    owners: Int64
    starts: Int64
    labels: Int64


_NO_PIECES = _OwnedPieces(*[np.zeros(0, dtype=np.int64)] * 3)


@lru_cache(maxsize=2048)
def _stretches(order: SampleOrder) -> tuple[Stretch, ...]:
    """Return the stretches of an order: one for each length."""
    found = [Stretch(0, order.seq_len)]
    for change in order.later:
        found.append(following(found[-1], change, order.epoch_parts))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PackedOrder:
    """The order of packed samples: each epoch has every bin once, in another order."""

    bins: PackedBins
    seed: int

    @property
    def seq_len(self) -> int:
        return self.bins.seq_len

    @property
    def samples_per_epoch(self) -> int:
        return self.bins.num_bins

    def with_lengths(self, lengths: Sequence[LengthChange]) -> Self:
        """Return this order, which can have one length only.

        Raises: DataError for another length; the configuration refuses it before.
        """
        found = sorted({change.seq_len for change in lengths} - {self.seq_len})
        if found:
            raise DataError(
                f"{self.bins.path}: has samples of {self.seq_len} tokens, and a stage needs {found[0]}; "
                'use data.packing="none", or one length for the whole run'
            )
        return self

    def lengths(self, indices: Int64) -> Int64:
        """Return the number of positions of each sample, the same for all. Shapes: all [N]."""
        return np.full_like(indices, self.seq_len)

    def epochs_after(self, num_samples: int) -> float:
        """Return how many passes over the bins the first samples are."""
        return num_samples / self.samples_per_epoch

    def pieces(self, cursors: NDArray[np.int64]) -> SamplePieces:
        """Return the pieces of samples `cursors`. Raises: BadTokensError when the file of bins is damaged there."""
        epochs, indices = np.divmod(np.asarray(cursors, dtype=np.int64), self.samples_per_epoch)
        keys = mixed(epoch_keys(self.seed, epochs) ^ np.uint64(_STREAM_PERMUTATION))
        found, bounds = self.bins.read(permuted(indices, self.samples_per_epoch, keys))
        return SamplePieces(found["start"].astype(np.int64), found["labels"].astype(np.int64), bounds)


def order_of(
    dataset: IndexedDataset, seq_len: int, seed: int, *, is_packed: bool, sizes: PartSizes = WHOLE
) -> SampleOrder | PackedOrder:
    """Return the order of the samples of a pair of token files. sizes: of the parts of an epoch, without packing.

    Raises: DataError when it has too few tokens, or when the file of packed samples cannot be used.
    """
    if is_packed:
        return PackedOrder(PackedBins(dataset, seq_len), seed)
    return SampleOrder(dataset.num_tokens, seq_len, seed, str(dataset.prefix), sizes)
