"""The sample order: a permutation in every epoch, different between epochs, and a pure function of (seed, cursor)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import DataError
from megatrain.data.order import SampleOrder
from megatrain.data.permutation import permuted


def keys(count: int, key: int) -> np.ndarray:
    return np.full(count, key, dtype=np.uint64)


@pytest.mark.slow
def test_every_size_up_to_2000_is_permuted() -> None:
    for size in range(1, 2001):
        images = permuted(np.arange(size), size, keys(size, size * 7919))
        assert np.array_equal(np.sort(images), np.arange(size)), size


@pytest.mark.slow
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=150, derandomize=True)
def test_any_key_permutes(size: int, key: int) -> None:
    images = permuted(np.arange(size), size, keys(size, key))
    assert np.array_equal(np.sort(images), np.arange(size))


def test_huge_sizes_stay_in_range_and_do_not_collide() -> None:
    size = 2**60 - 1
    images = permuted(np.arange(0, size, size // 5000), size, keys(5001, 1))
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == len(images)


def test_an_index_goes_everywhere_about_equally_often() -> None:
    for size in (2, 3, 5, 24, 100):
        num_epochs = 400 * size
        order = SampleOrder(num_tokens=size + 1, seq_len=1, seed=5)
        assert order.samples_per_epoch == size
        for index in (0, size - 1):
            starts = order.window_starts(np.arange(num_epochs) * size + index)
            counts = np.bincount(starts, minlength=size)
            chi_square = float(((counts - 400) ** 2 / 400).sum())
            # The mean of chi-square is its degrees of freedom; 8 deviations (sqrt(2 * degrees)) never happen by chance.
            assert chi_square < (size - 1) + 8 * (2 * (size - 1)) ** 0.5, (size, index, chi_square)


def test_neighbors_are_independent() -> None:
    """Pairs of consecutive samples are distributed as in a random permutation."""
    order = SampleOrder(num_tokens=10_001, seq_len=1, seed=1)
    starts = order.window_starts(np.arange(10_000))
    assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(np.arange(10_000), starts)[0, 1]) < 0.05
    num_steps_of_one = int((np.abs(np.diff(starts)) == 1).sum())
    assert num_steps_of_one < 12  # 2 are expected


@given(
    num_windows=st.integers(1, 300), rest=st.integers(0, 63), seq_len=st.integers(1, 64), seed=st.integers(-5, 2**63)
)
@settings(max_examples=100, derandomize=True)
def test_windows_of_an_epoch_tile_the_stream(num_windows: int, rest: int, seq_len: int, seed: int) -> None:
    num_tokens = (num_windows + 1) * seq_len + rest % seq_len
    order = SampleOrder(num_tokens, seq_len, seed)
    assert order.samples_per_epoch == num_windows
    for epoch in range(3):
        starts = np.sort(order.window_starts(epoch * num_windows + np.arange(num_windows)))
        assert 0 <= starts[0] < seq_len
        assert np.array_equal(np.diff(starts), np.full(num_windows - 1, seq_len))
        assert starts[-1] + seq_len + 1 <= num_tokens  # The last label is within the stream.


def test_epochs_and_seeds_differ_in_order_and_offset() -> None:
    def epoch(seed: int, number: int) -> np.ndarray:
        order = SampleOrder(num_tokens=128 * 101, seq_len=128, seed=seed)
        return order.window_starts(number * 100 + np.arange(100))

    epochs = [epoch(seed, number) for seed in (1, 2) for number in (0, 1, 2, 3)]
    for one in range(len(epochs)):
        for other in range(one):
            assert (epochs[one] // 128 == epochs[other] // 128).mean() < 0.1
    assert len({int(starts.min()) for starts in epochs}) > 4


def test_order_is_frozen() -> None:
    """These numbers are effectively part of a checkpoint: another order would change what a resumed run reads."""
    order = SampleOrder(num_tokens=1000, seq_len=10, seed=1234)
    cursors = [0, 1, 2, 98, 99, 10**15]
    assert order.window_starts(np.array(cursors)).tolist() == [162, 532, 292, 242, 767, 545]
    assert [in_plain_python(cursor, 1000, 10, 1234) for cursor in cursors] == [162, 532, 292, 242, 767, 545]


def in_plain_python(cursor: int, num_tokens: int, seq_len: int, seed: int) -> int:
    """Compute the same order without numpy, one cursor at a time, in integers of any size."""

    def mix(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    size = num_tokens // seq_len - 1
    epoch, index = divmod(cursor, size)
    epoch_key = mix(mix(seed) ^ epoch)
    key = mix(epoch_key ^ 1)
    side = next(side for side in range(1, size + 1) if side * side >= size)
    while True:
        left, right = divmod(index, side)
        for round_number in range(8):
            left, right = right, (left + mix(key ^ right ^ round_number << 56) % side) % side
        index = left * side + right
        if index < size:
            return mix(epoch_key) % seq_len + index * seq_len


def test_a_stream_shorter_than_two_windows_is_refused() -> None:
    with pytest.raises(DataError, match=r"small\.bin: holds 63 tokens, and model\.seq_len=32 needs at least 64"):
        SampleOrder(num_tokens=63, seq_len=32, seed=1, source="small.bin")
