"""The bubble of every schedule, timed by the replay engine, equals its closed form exactly."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain.schedule import SCHEDULE_NAMES, ComputeDurations, bubble_fraction, build_schedule, infeasibility
from tests.helpers.timed_schedules import TimedSchedules

DURATIONS = [
    (1, 1, 1),
    (2, 1, 1),
    # Each of the three is the shortest in turn; weights may cost nothing.
    (1, 3, 2),
    (3, 1, 2),
    (3, 2, 1),
    (2, 3, 0),
    *(tuple(random.Random(n).choices(range(1, 1000), k=3)) for n in range(2)),
]
"""Durations of forward, dgrad and wgrad of a model chunk, as integers so that equality is exact."""

MICROBATCHES = (*range(1, 18), 23, 24, 27, 31, 32)
"""Fewer micro-batches than stages, equal numbers, every remainder in two groups; three and four groups of eight."""

SIZES = [
    (name, pp_size, num_chunks, num_microbatches)
    for name in SCHEDULE_NAMES
    for pp_size in range(1, 9)
    for num_chunks in range(1, 5)
    for num_microbatches in MICROBATCHES
    if infeasibility(name, pp_size, num_chunks, num_microbatches) is None
]


@pytest.fixture(scope="module")
def makespans() -> dict[tuple[str, int, int, int], NDArray[np.int64]]:
    """The duration of a step of every schedule, for each of the durations."""
    schedules = TimedSchedules()
    parts = {sizes: schedules.add(build_schedule(*sizes)) for sizes in SIZES}
    kinds = np.array(schedules.kinds)
    durations = np.stack([np.array([forward, half + rest, half, rest])[kinds] for forward, half, rest in DURATIONS])
    ends = schedules.ends(durations)
    return {sizes: ends[part].max(axis=0) for sizes, part in parts.items()}


@pytest.mark.slow
def test_bubble_equals_its_closed_form(makespans: dict[tuple[str, int, int, int], NDArray[np.int64]]) -> None:
    for sizes, makespan in makespans.items():
        name, pp_size, num_chunks, num_microbatches = sizes
        for durations, time in zip(DURATIONS, makespan.tolist(), strict=True):
            forward, half, rest = durations
            compute = num_chunks * num_microbatches * sum(durations)
            idle = forward + half - min(durations) if name == "zero_bubble" else forward + half + rest
            assert time - compute == (pp_size - 1) * idle, sizes
            assert (time - compute) / compute == bubble_fraction(*sizes, ComputeDurations(*durations)), sizes


def test_bubble_without_durations_is_that_of_equal_ones() -> None:
    assert bubble_fraction("1f1b", 4, 1, 8) == 3 / 8
    assert bubble_fraction("zero_bubble", 4, 1, 8) == 1 / 8


@pytest.mark.slow
def test_four_times_the_batch_has_a_quarter_of_the_bubble(
    makespans: dict[tuple[str, int, int, int], NDArray[np.int64]],
) -> None:
    # LAMB permits it. The paper's own figure for the same case is 87.5 % less; counting the steps gives 75 %.
    for num_chunks in (2, 3):
        per_step = num_chunks * np.array([sum(durations) for durations in DURATIONS])
        four_small_steps = 4 * (makespans["interleaved", 4, num_chunks, 8] - 8 * per_step)
        one_large_step = makespans["interleaved", 4, num_chunks, 32] - 32 * per_step
        assert (four_small_steps == 4 * one_large_step).all()
        assert bubble_fraction("interleaved", 4, num_chunks, 8) == 4 * bubble_fraction("interleaved", 4, num_chunks, 32)
