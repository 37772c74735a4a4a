"""Keyed permutations of any size without a table: a Feistel network, cycle-walked to the exact size.

Source: cycle walking is Black and Rogaway 2002; the mixer is the finalizer of splitmix64 (Steele et al. 2014).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_WORD = (1 << 64) - 1


def epoch_keys(seed: int, epochs: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the key of each epoch of a stream. Shapes: all [N]."""
    return mixed(mixed(np.uint64(seed & _WORD) + np.zeros_like(epochs, np.uint64)) ^ epochs.astype(np.uint64))


def key_of(seed: int, *numbers: int) -> np.uint64:
    """Return the key of a permutation that a seed and some numbers select."""
    key = mixed(np.array([seed & _WORD], dtype=np.uint64))
    for number in numbers:
        key = mixed(key ^ np.uint64(number & _WORD))
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
        word = mixed(keys ^ right ^ np.uint64(round_number << 56))
        left, right = right, (left + word % side) % side
    return left * side + right


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-mixed words; a bijection of 64-bit words (uint64 arithmetic wraps on purpose)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
