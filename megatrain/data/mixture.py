"""The source of each sample of a run, and its number within that source: a pure function of the sample's number.

Samples are divided into blocks. At the end of a block, after N samples of a stage, the sources have been apportioned N
samples by their weights with Webster's rule. That rule is monotone: a longer run never has fewer samples of a source.
Within a block, a keyed permutation determines the order of the sources, and each source continues in its own order
(`order.SampleOrder`). So the samples of a run up to any number are a prefix of each source's order, a stage may begin
inside a block, and only the stages are stored.
Source: Webster's rule is Sainte-Lague's divisor method; Balinski and Young, Fair Representation (1982), ch. 3 and 4.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream
from megatrain.data.permutation import key_of, permuted
from megatrain.data.stretches import LengthChange

BLOCK_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sources of the samples of a run. `stages` ascend; the first one begins at sample 0."""

    seed: int
    stages: tuple[MixtureStage, ...]
    num_sources: int

    @classmethod
    def of(cls, stream: SampleStream) -> Mixture:
        """Return the mixture of a stream that has at least one source."""
        return cls(stream.seed, stream.stages, len(stream.sources))

    def places(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, and the sample's number in the order of that source. Shapes: all [N]."""
        sources, indices = np.empty_like(samples), np.empty_like(samples)
        firsts = np.array([stage.first_sample for stage in self.stages], dtype=np.int64)
        stage_of = np.searchsorted(firsts, samples, side="right") - 1
        block_of, position_of = np.divmod(samples - firsts[stage_of], BLOCK_SAMPLES)
        for stage, block in sorted(set(zip(stage_of.tolist(), block_of.tolist(), strict=True))):
            found = (stage_of == stage) & (block_of == block)
            block_sources, block_indices = _block(
                self.seed, self._weights(stage), self.stages[stage].first_sample, block
            )
            sources[found] = block_sources[position_of[found]]
            indices[found] = block_indices[position_of[found]]
            indices[found] += _counts_before(self)[stage][sources[found]]
        return sources, indices

    def weights(self, sample: int) -> tuple[int, ...]:
        """Return the weight of each source in the stage of sample number `sample`."""
        return self._weights(self._stage_of(sample))

    def seq_len(self, sample: int) -> int:
        """Return the tokens of sample number `sample`."""
        return self.stages[self._stage_of(sample)].seq_len

    def lengths_of(self, source: int) -> tuple[LengthChange, ...]:
        """Return the lengths of the samples of a source, each with the number of the first sample that has it.

        The first of these numbers is 0.
        """
        found: list[LengthChange] = []
        for number, (stage, counts) in enumerate(zip(self.stages, _counts_before(self), strict=True)):
            first = int(counts[source])
            if found and found[-1].first_index == first:
                found.pop()  # the source has no sample of that length
            is_over = number == len(self.stages) - 1 and not self._weights(number)[source]
            if not found or (found[-1].seq_len != stage.seq_len and not is_over):
                found.append(LengthChange(first, stage.seq_len))
        return tuple(found)

    def counts(self, sample: int) -> NDArray[np.int64]:
        """Return how many of the samples before number `sample` come from each source. Shape: [num_sources]."""
        stage = self._stage_of(sample)
        return _counts_before(self)[stage] + self._counts_within(stage, sample - self.stages[stage].first_sample)

    def _counts_within(self, stage: int, num_samples: int) -> NDArray[np.int64]:
        """Return how many of the first samples of a stage come from each source."""
        block, position = divmod(num_samples, BLOCK_SAMPLES)
        weights = self._weights(stage)
        counted = np.array(quotas(block * BLOCK_SAMPLES, weights), dtype=np.int64)
        if position:
            part, _ = _block(self.seed, weights, self.stages[stage].first_sample, block)
            counted += np.bincount(part[:position], minlength=self.num_sources)
        return counted

    def _stage_of(self, sample: int) -> int:
        return max(number for number, stage in enumerate(self.stages) if stage.first_sample <= sample)

    def _weights(self, stage: int) -> tuple[int, ...]:
        weights = self.stages[stage].weights
        return weights + (0,) * (self.num_sources - len(weights))


@lru_cache(maxsize=16)
def _counts_before(mixture: Mixture) -> tuple[NDArray[np.int64], ...]:
    """Return, for each stage, how many samples of each source come before it."""
    found = [np.zeros(mixture.num_sources, dtype=np.int64)]
    for number, (stage, following) in enumerate(pairwise(mixture.stages)):
        found.append(found[-1] + mixture._counts_within(number, following.first_sample - stage.first_sample))
    return tuple(found)


@lru_cache(maxsize=64)
def _block(
    seed: int, weights: tuple[int, ...], first_sample: int, number: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each sample of a block, and the sample's number among the stage's samples of that source."""
    before = np.array(quotas(number * BLOCK_SAMPLES, weights), dtype=np.int64)
    after = np.array(quotas((number + 1) * BLOCK_SAMPLES, weights), dtype=np.int64)
    counts = after - before
    positions = np.arange(BLOCK_SAMPLES, dtype=np.int64)
    keys = np.full(BLOCK_SAMPLES, key_of(seed, first_sample, number))
    sources = np.searchsorted(np.cumsum(counts), permuted(positions, BLOCK_SAMPLES, keys), side="right")
    by_source = np.argsort(sources, kind="stable")
    ranks = np.empty_like(positions)
    # the positions of a source are consecutive in `by_source`, in the order of the block
    ranks[by_source] = positions - np.repeat(np.cumsum(counts) - counts, counts)
    return sources.astype(np.int64), before[sources] + ranks


def quotas(num_samples: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return how many of `num_samples` each source gets by Webster's rule; ties go to the first source.

    Seat s of a source, counted from 0, has priority weight / (2 s + 1), and the N highest priorities get the N seats.
    Rounding each exact share gives the same result except for a few seats, which are added or removed by priority.
    """
    total = sum(weights)
    seats = [(2 * num_samples * weight + total) // (2 * total) for weight in weights]
    missing = num_samples - sum(seats)
    sign = 1 if missing > 0 else -1

    def next_seat(source: int) -> tuple[Fraction, int]:
        """Return the sort key of the seat to add next, or, negated, of the seat to remove next."""
        seat = seats[source] if missing > 0 else seats[source] - 1
        return sign * Fraction(2 * seat + 1, weights[source]), sign * source

    heap = [next_seat(source) for source in range(len(weights)) if weights[source] and (missing > 0 or seats[source])]
    heapq.heapify(heap)
    for _ in range(abs(missing)):
        source = sign * heap[0][1]
        seats[source] += sign
        if missing > 0 or seats[source]:
            heapq.heapreplace(heap, next_seat(source))
        else:
            heapq.heappop(heap)
    return tuple(seats)
