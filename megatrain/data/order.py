"""The pieces of the token stream in sample number `cursor`: a pure function of (seed, cursor).

Without packing, each epoch divides the stream into consecutive windows of seq_len tokens, starting at an offset of the
epoch; with packing, the samples of an epoch are the bins of a file. An epoch visits them in the order of a Feistel
permutation keyed by (seed, epoch), cycle-walked to their exact number. No order is stored: any sample is found in O(1),
so a run resumes at a cursor at once, with any number of data-parallel ranks.
Source: cycle walking is Black and Rogaway 2002; the mixer is the finaliser of splitmix64 (Steele et al. 2014).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.data.bins import PackedBins
from megatrain.data.indexed import IndexedDataset

_ROUNDS = 8
_STREAM_OFFSET = 0
_STREAM_PERMUTATION = 1
_WORD = (1 << 64) - 1


class SamplePieces(NamedTuple):
    """The pieces of N samples: sample n has those from bounds[n] to bounds[n + 1].

    A piece has a first token and a number of labels; it spans one token more than labels. Shapes: starts and labels
    [P], bounds [N + 1].
    """

    starts: NDArray[np.int64]
    labels: NDArray[np.int64]
    bounds: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of samples over a stream of `num_tokens`; `source` names the stream in errors.

    Raises: DataError when the stream is shorter than two windows, the minimum for an epoch with an offset.
    """

    num_tokens: int
    seq_len: int
    seed: int
    source: str = "the training data"

    def __post_init__(self) -> None:
        if self.num_tokens < 2 * self.seq_len:
            raise DataError(
                f"{self.source}: holds {self.num_tokens} tokens, model.seq_len={self.seq_len} needs at least "
                f"{2 * self.seq_len}; use more text or a smaller model.seq_len"
            )

    @property
    def samples_per_epoch(self) -> int:
        """The number of windows n. With the largest offset, seq_len - 1, they end before token (n + 1) * seq_len."""
        return (self.num_tokens - self.seq_len) // self.seq_len

    def window_starts(self, cursors: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the starts of the windows of samples `cursors`. Each window spans seq_len + 1 tokens; the last token
        is only a label."""
        epochs, indices = np.divmod(np.asarray(cursors, dtype=np.int64), self.samples_per_epoch)
        epoch_keys = _epoch_keys(self.seed, epochs)
        offsets = _mix(epoch_keys ^ np.uint64(_STREAM_OFFSET)) % np.uint64(self.seq_len)
        windows = permuted(indices, self.samples_per_epoch, _mix(epoch_keys ^ np.uint64(_STREAM_PERMUTATION)))
        return offsets.astype(np.int64) + windows * self.seq_len

    def pieces(self, cursors: NDArray[np.int64]) -> SamplePieces:
        """Return the window of each sample as its only piece."""
        starts = self.window_starts(cursors)
        return SamplePieces(starts, np.full_like(starts, self.seq_len), np.arange(len(starts) + 1))


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

    def pieces(self, cursors: NDArray[np.int64]) -> SamplePieces:
        """Return the pieces of samples `cursors`. Raises: BadTokensError when the file of bins is damaged there."""
        epochs, indices = np.divmod(np.asarray(cursors, dtype=np.int64), self.samples_per_epoch)
        keys = _mix(_epoch_keys(self.seed, epochs) ^ np.uint64(_STREAM_PERMUTATION))
        found, bounds = self.bins.read(permuted(indices, self.samples_per_epoch, keys))
        return SamplePieces(found["start"].astype(np.int64), found["labels"].astype(np.int64), bounds)


def order_of(dataset: IndexedDataset, seq_len: int, seed: int, *, is_packed: bool) -> SampleOrder | PackedOrder:
    """Return the order of the samples of a pair of token files.

    Raises: DataError when it has too few tokens, or when the file of packed samples cannot be used.
    """
    if is_packed:
        return PackedOrder(PackedBins(dataset, seq_len), seed)
    return SampleOrder(dataset.num_tokens, seq_len, seed, str(dataset.prefix))


def _epoch_keys(seed: int, epochs: NDArray[np.int64]) -> NDArray[np.uint64]:
    return _mix(_mix(np.uint64(seed & _WORD) + np.zeros_like(epochs, np.uint64)) ^ epochs.astype(np.uint64))


def key_of(seed: int, *numbers: int) -> np.uint64:
    """Return the key of a permutation that a seed and some numbers select."""
    key = _mix(np.array([seed & _WORD], dtype=np.uint64))
    for number in numbers:
        key = _mix(key ^ np.uint64(number & _WORD))
    return np.uint64(key[0])


def permuted(indices: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the images of `indices` under permutations of range(size); `keys` (one per index) select the permutation.

    The network works on pairs (left, right) of numbers below `side`. The square of `side` is the smallest square of at
    least `size` and exceeds it by at most 2 * sqrt(size) + 1 numbers, so further steps of the walk are rare.
    """
    side = np.uint64(math.isqrt(size - 1) + 1)
    walked = indices.astype(np.uint64)
    outside = np.arange(len(walked))
    while len(outside):
        walked[outside] = _feistel(walked[outside], side, keys[outside])
        outside = outside[walked[outside] >= np.uint64(size)]
    return walked.astype(np.int64)


def _feistel(numbers: NDArray[np.uint64], side: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    left, right = np.divmod(numbers, side)
    for round_number in range(_ROUNDS):
        # Each round has a different key. right < 2^32, so the round number fits above it.
        mixed = _mix(keys ^ right ^ np.uint64(round_number << 56))
        left, right = right, (left + mixed % side) % side
    return left * side + right


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-mixed words; a bijection of 64-bit words (uint64 arithmetic wraps on purpose)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
