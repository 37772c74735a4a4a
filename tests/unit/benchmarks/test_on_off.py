"""How the telemetry benchmark compares steps with telemetry on and off, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.on_off import (
    BLOCK,
    MAX_HALF_WIDTH,
    MAX_S,
    MIN_SECTIONS,
    SECTION,
    TURN,
    WARMUP,
    is_enough,
    is_on,
    ratio_and_half_width,
    turn_logs,
)

STEP_S, COST = 0.05, 1.003
NUM_STEPS = WARMUP + 12 * SECTION
IS_ON = np.array([is_on(step) for step in range(NUM_STEPS)])
Noise = Callable[[np.random.Generator], NDArray[np.float64]]


def drawn(noise: Noise, seed: int) -> NDArray[np.float64]:
    """Return the seconds of steps that cost COST times as much with telemetry on."""
    seconds: NDArray[np.float64] = STEP_S * np.where(IS_ON, COST, 1.0) * noise(np.random.default_rng(seed))
    return seconds


def normal(generator: np.random.Generator) -> NDArray[np.float64]:
    return 1.0 + 0.03 * generator.standard_normal(NUM_STEPS)


def interrupted(generator: np.random.Generator) -> NDArray[np.float64]:
    """One step in 50 waits for another program, for up to three steps' time."""
    is_hit = generator.random(NUM_STEPS) < 0.02
    return normal(generator) + is_hit * generator.uniform(0.5, 3.0, NUM_STEPS)


def drifting(generator: np.random.Generator) -> NDArray[np.float64]:
    """The machine's speed wanders by a few percent within a minute."""
    return normal(generator) * np.exp(np.cumsum(0.002 * generator.standard_normal(NUM_STEPS)))


def measured(seconds: NDArray[np.float64]) -> tuple[int, float, float]:
    """Return the number of steps when the rule ends the measurement, the ratio, and its upper bound."""
    ends = range(WARMUP + SECTION, NUM_STEPS + 1, SECTION)
    end = next((end for end in ends if is_enough(end, 0.0, partial(list, seconds[:end]))), NUM_STEPS)
    ratio, half_width = ratio_and_half_width(turn_logs(list(seconds[:end])))
    return end, ratio, ratio * (1.0 + half_width)


def test_a_turn_has_as_many_steps_on_as_off_and_cancels_a_drift() -> None:
    for first in range(0, 3 * TURN, TURN):
        turn = [is_on(step) for step in range(first, first + TURN)]
        assert turn == BLOCK * [True] + 2 * BLOCK * [False] + BLOCK * [True]
        places = np.arange(TURN)
        assert places[turn].sum() == places[np.logical_not(turn)].sum()


def test_each_turn_that_counts_gives_one_figure() -> None:
    seconds = [STEP_S * (COST if is_on(step) else 1.0) for step in range(WARMUP + 2 * SECTION + TURN - 1)]
    for step in (0, WARMUP - 1, WARMUP + SECTION - 1):
        seconds[step] = 100.0  # warm-up, and the turn in which the rule is evaluated
    logs = turn_logs(seconds)
    assert len(logs) == 2 * (SECTION // TURN - 1), "the last turn is not complete"
    assert logs == pytest.approx([math.log(COST)] * len(logs))


@pytest.mark.parametrize("noise", [normal, interrupted, drifting])
def test_upper_bound_holds_in_95_of_100_measurements(noise: Noise) -> None:
    found = [measured(drawn(noise, seed)) for seed in range(150)]
    # 142.5 bounds are expected to hold, with a standard deviation of 2.7
    assert sum(upper >= COST for _, _, upper in found) >= 135
    assert np.mean([ratio for _, ratio, _ in found]) == pytest.approx(COST, abs=3e-4), "no side is favored"


def test_measurement_ends_when_its_interval_is_narrow() -> None:
    quiet, noisy = drawn(lambda generator: 1.0 + 0.001 * generator.standard_normal(NUM_STEPS), 0), drawn(normal, 0)
    assert measured(quiet)[0] == WARMUP + MIN_SECTIONS * SECTION
    end, ratio, upper = measured(noisy)
    assert WARMUP + MIN_SECTIONS * SECTION < end < NUM_STEPS
    assert upper / ratio - 1.0 <= MAX_HALF_WIDTH


def test_measurement_ends_after_a_turn_when_time_is_over() -> None:
    wild = list(drawn(lambda generator: generator.uniform(0.5, 1.5, NUM_STEPS), 0))
    for num_steps, elapsed_s, ends in (
        (NUM_STEPS, MAX_S - 1.0, False),
        (NUM_STEPS, MAX_S, True),
        (WARMUP + TURN, MAX_S, True),
        (WARMUP + TURN + 1, MAX_S, False),
        (WARMUP, MAX_S, False),
    ):
        assert is_enough(num_steps, elapsed_s, lambda: wild) == ends, (num_steps, elapsed_s)
