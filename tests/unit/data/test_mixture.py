"""Mixtures: Webster's rule compared with seats given one by one, each source in its own order, and stages at any
sample."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.checkpoint_format.sample_stream import MixtureStage
from megatrain.config.data import integer_weights
from megatrain.data.mixture import BLOCK_SAMPLES, Mixture, quotas
from megatrain.data.stretches import LengthChange

WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any)


def seats_one_by_one(num_samples: int, weights: list[int]) -> tuple[int, ...]:
    """Give each seat to the greatest weight / (2 seats + 1), the first of equals."""
    seats = [0] * len(weights)
    for _ in range(num_samples):
        claims = [Fraction(weight, 2 * seat + 1) for weight, seat in zip(weights, seats, strict=True)]
        seats[claims.index(max(claims))] += 1
    return tuple(seats)


@settings(max_examples=40)
@given(WEIGHTS, st.integers(0, 400))
def test_quotas_are_those_of_seats_given_one_by_one(weights: list[int], num_samples: int) -> None:
    assert quotas(num_samples, weights) == seats_one_by_one(num_samples, weights)


@given(WEIGHTS, st.integers(0, 2**55))
def test_quotas_of_long_runs_are_complete_and_monotone(weights: list[int], num_samples: int) -> None:
    found = quotas(num_samples, weights)
    assert sum(found) == num_samples
    more = quotas(num_samples + 1, weights)
    assert sorted(Counter(after - before for before, after in zip(found, more, strict=True)).items()) == (
        [(0, len(weights) - 1), (1, 1)] if len(weights) > 1 else [(1, 1)]
    )
    total = sum(weights)
    for weight, count in zip(weights, found, strict=True):
        assert abs(count - Fraction(num_samples * weight, total)) < len(weights)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Mixture, int]:
    """Draw a mixture of a few stages, and the end of the samples to examine."""
    num_sources = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 2 * BLOCK_SAMPLES), min_size=1, max_size=3))
    firsts = [0, *np.cumsum(lengths).tolist()]
    weights = st.lists(st.integers(0, 9), min_size=num_sources, max_size=num_sources).filter(any)
    stages = tuple(MixtureStage(first, tuple(draw(weights)), 16) for first in firsts[:-1])
    return Mixture(draw(st.integers(0, 2**63)), stages, num_sources), firsts[-1]


@settings(max_examples=40)
@given(mixtures())
def test_each_source_is_read_in_its_own_order_without_gaps(drawn: tuple[Mixture, int]) -> None:
    """A source continues at its position, across stages too."""
    mixture, end = drawn
    sources, indices = mixture.places(np.arange(end))
    for source in range(mixture.num_sources):
        found = indices[sources == source]
        assert np.array_equal(found, np.arange(len(found)))
        assert mixture.counts(end)[source] == len(found)
    for stage, following in zip(mixture.stages, [*mixture.stages[1:], None], strict=True):
        inside = sources[stage.first_sample : following.first_sample if following else end]
        assert all(stage.weights[source] for source in np.unique(inside))


@settings(max_examples=40)
@given(mixtures(), st.data())
def test_any_samples_are_found_as_when_all_are_read(drawn: tuple[Mixture, int], data: st.DataObject) -> None:
    mixture, end = drawn
    samples = np.array(data.draw(st.lists(st.integers(0, end - 1), max_size=40)), dtype=np.int64)
    everything = mixture.places(np.arange(end))
    for found, whole in zip(mixture.places(samples), everything, strict=True):
        assert np.array_equal(found, whole[samples])
    sample = data.draw(st.integers(0, end))
    assert np.array_equal(mixture.counts(sample), np.bincount(everything[0][:sample], minlength=mixture.num_sources))


def test_a_source_has_no_length_after_its_last_sample() -> None:
    stages = (MixtureStage(0, (1, 1), 4), MixtureStage(100, (1, 0), 8), MixtureStage(200, (1, 0), 64))
    whole, ended = (Mixture(7, stages, 2).lengths_of(source) for source in range(2))
    assert [change.seq_len for change in whole] == [4, 8, 64]
    assert ended == (LengthChange(0, 4),)


@pytest.mark.slow
def test_a_run_may_have_thousands_of_stages() -> None:
    stages = tuple(MixtureStage(10 * number, (1 + number % 2, 1), 16) for number in range(1200))
    mixture = Mixture(7, stages, 2)
    assert mixture.counts(12_000).sum() == 12_000
    sources, indices = mixture.places(np.arange(11_000, 12_000))
    assert mixture.counts(11_000)[sources[0]] == indices[0]


def test_sources_of_a_block_are_mixed_by_the_seed() -> None:
    """No source comes in long runs, and another seed or block has another order with the same counts."""
    weights = (2, 1, 1)
    orders = [
        Mixture(seed, (MixtureStage(0, weights, 16),), 3).places(np.arange(2 * BLOCK_SAMPLES))[0] for seed in (1, 2)
    ]
    blocks = [order[first : first + BLOCK_SAMPLES] for order in orders for first in (0, BLOCK_SAMPLES)]
    assert len({block.tobytes() for block in blocks}) == len(blocks)
    for block in blocks:
        assert np.bincount(block).tolist() == [BLOCK_SAMPLES // 2, BLOCK_SAMPLES // 4, BLOCK_SAMPLES // 4]
        for half in np.split(block, 2):
            assert abs(np.mean(half == 0) - 0.5) < 0.05


def test_weights_become_the_smallest_integers() -> None:
    for weights, expected in [
        ([0.7, 0.3], (7, 3)),
        ([7.0, 3.0], (7, 3)),
        ([1.0], (1,)),
        ([0.0, 0.5, 0.25], (0, 2, 1)),
        ([1e-9, 1e6], (1, 10**15)),
        ([1 / 3, 2 / 3], (333_333_333, 666_666_667)),
        ([0.0], (0,)),
    ]:
        assert integer_weights(weights) == expected, weights
