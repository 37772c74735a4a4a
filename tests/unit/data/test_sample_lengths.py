"""Changes of the sample length: each token of an epoch is in one sample, and earlier samples never change."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import DataError
from megatrain.data.order import SampleOrder
from megatrain.data.parts import PartSizes
from megatrain.data.stretches import LengthChange

Piece = tuple[int, int]
LENGTHS = (1, 2, 4, 8, 16)


def samples(order: SampleOrder, first: int, end: int) -> list[list[Piece]]:
    """Return the pieces (first token, number of labels) of each sample."""
    starts, labels, bounds = (array.tolist() for array in order.pieces(np.arange(first, end)))
    return [list(zip(starts[one:other], labels[one:other], strict=True)) for one, other in pairwise(bounds)]


def label_tokens(found: list[list[Piece]]) -> list[int]:
    return [token for pieces in found for start, count in pieces for token in range(start + 1, start + count + 1)]


def check_epochs(order: SampleOrder, num_samples: int) -> None:
    """Check that the samples fill epochs one after another: each a range of consecutive tokens, each token once."""
    found = samples(order, 0, num_samples)
    lengths = order.lengths(np.arange(num_samples)).tolist()
    first = 0
    while first < num_samples:
        # the first sample of an epoch determines its offset and its size
        size = (order.num_tokens - lengths[first]) // lengths[first] * lengths[first]
        labels: list[int] = []
        while first < num_samples and len(labels) < size:
            labels += label_tokens(found[first : first + 1])
            first += 1
        assert len(set(labels)) == len(labels)
        assert min(labels) > 0
        assert max(labels) < order.num_tokens
        if len(labels) >= size:
            assert sorted(labels) == list(range(min(labels), min(labels) + size))


CHANGES = st.lists(st.tuples(st.integers(1, 60), st.sampled_from(LENGTHS)), max_size=4)


@settings(derandomize=True, max_examples=120, deadline=None)
@given(
    num_tokens=st.integers(32, 300),
    seed=st.integers(0, 2**32),
    first_len=st.sampled_from(LENGTHS),
    steps=CHANGES,
    sizes=st.sampled_from([PartSizes(), PartSizes(16, 16), PartSizes(16, 48), PartSizes(32, 64)]),
)
def test_each_token_of_an_epoch_is_read_once(
    num_tokens: int, seed: int, first_len: int, steps: list[tuple[int, int]], sizes: PartSizes
) -> None:
    index, later = 0, []
    for distance, seq_len in steps:
        index += distance
        later.append(LengthChange(index, seq_len))
    order = SampleOrder(num_tokens, first_len, seed, sizes=sizes, later=tuple(later))
    check_epochs(order, index + 2 * num_tokens // min(LENGTHS))


@settings(derandomize=True, max_examples=80, deadline=None)
@given(
    num_tokens=st.integers(64, 300),
    lengths=st.lists(st.integers(1, 32), min_size=2, max_size=4),
    distances=st.lists(st.integers(1, 30), min_size=3, max_size=3),
    cursors=st.lists(st.integers(0, 10**6), min_size=1, max_size=20),
)
def test_order_with_lengths_is_pure(
    num_tokens: int, lengths: list[int], distances: list[int], cursors: list[int]
) -> None:
    """Any lengths, including lengths that do not divide each other. Samples one by one, and in any order, are the
    same."""
    firsts = np.cumsum(distances).tolist()
    later = tuple(LengthChange(*one) for one in zip(firsts, lengths[1:], strict=False))
    order = SampleOrder(num_tokens, lengths[0], seed=3, later=later)
    starts, labels, bounds = (array.tolist() for array in order.pieces(np.array(cursors)))
    for number, cursor in enumerate(cursors):
        own = slice(bounds[number], bounds[number + 1])
        assert samples(order, cursor, cursor + 1) == [list(zip(starts[own], labels[own], strict=True))]
        seq_len = int(order.lengths(np.array([cursor]))[0])
        assert 0 < sum(labels[own]) <= seq_len
        assert all(
            start >= 0 and start + count < num_tokens for start, count in zip(starts[own], labels[own], strict=True)
        )


@settings(derandomize=True, max_examples=100, deadline=None)
@given(seed=st.integers(0, 1000), cursor=st.integers(1, 200), moved=st.integers(0, 50), sizes=st.sampled_from(
    [PartSizes(), PartSizes(16, 64)]
))  # fmt: skip
def test_a_later_change_leaves_the_past_as_it_was(seed: int, cursor: int, moved: int, sizes: PartSizes) -> None:
    plain = SampleOrder(1000, 4, seed, sizes=sizes)
    first = plain.with_lengths([LengthChange(0, 4), LengthChange(cursor, 16)])
    second = plain.with_lengths([*[LengthChange(0, 4), LengthChange(cursor, 16)], LengthChange(cursor + moved + 1, 8)])
    assert samples(first, 0, cursor) == samples(plain, 0, cursor)
    assert samples(second, 0, cursor + moved + 1) == samples(first, 0, cursor + moved + 1)


def test_parts_after_the_change_are_whole_windows() -> None:
    """Only the part that was begun has samples of several pieces."""
    order = SampleOrder(16 * 1024, 4, 7, sizes=PartSizes(64, 1024), later=(LengthChange(300, 64),))
    found = samples(order, 300, 300 + 1000)
    num_rest = (2 * 1024 - 300 * 4 + 63) // 64
    assert [len(pieces) for pieces in found[:num_rest]] == [16] * (num_rest - 1) + [4]
    assert {len(pieces) for pieces in found[num_rest:]} == {1}


def test_a_part_is_a_share_of_the_whole_file() -> None:
    order = SampleOrder(64 * 1025, 4, 7, sizes=PartSizes(64, 64 * 32))
    starts = np.sort(order.window_starts(np.arange(64 * 32 // 4)))
    assert len(np.unique(starts // 64)) in (32, 33, 64)  # 32 blocks, or both sides of each with an offset
    for quarter in range(4):
        assert len(np.unique(starts[starts * 4 // (64 * 1025) == quarter] // 64)) >= 3


@pytest.mark.parametrize("num_samples", [0, 1, 24, 25, 50, 75, 1000])
def test_epochs_follow_the_tokens(num_samples: int) -> None:
    plain = SampleOrder(104, 4, 1)  # 25 samples an epoch
    assert plain.epochs_after(num_samples) == num_samples / 25
    # 10 samples of 4, then the rest of the epoch as 7 samples of 8 and one of 4, then 12 samples of 8 per epoch
    changed = plain.with_lengths([LengthChange(0, 4), LengthChange(10, 8)])
    expected = [0.4, 0.48, 0.96, 1.0, 1 + 1 / 12]
    assert [changed.epochs_after(number) for number in (10, 11, 17, 18, 19)] == pytest.approx(expected)


def test_a_longer_later_length_needs_enough_tokens() -> None:
    with pytest.raises(DataError, match=r"holds 100 tokens, and model\.seq_len=64 needs at least 128"):
        SampleOrder(100, 4, 1, later=(LengthChange(10, 64),))
