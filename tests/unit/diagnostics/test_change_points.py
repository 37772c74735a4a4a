"""Change points and trends in series with known changes, and none in series without; medians are those of numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain_diagnostics.analysis.change_points import MIN_POINTS, change_points
from megatrain_diagnostics.analysis.medians import median, medians
from megatrain_diagnostics.analysis.trends import trend
from megatrain_diagnostics.events.tables import Float64


def stationary(seed: int, noise: float, length: int = 400) -> Float64:
    """Return a noisy series with occasional slow steps, as in real jobs."""
    random = np.random.default_rng(seed)
    values = 1.0 + noise * random.standard_normal(length)
    is_slow = random.random(length) < 0.03
    values[is_slow] *= random.uniform(1.5, 4.0, int(is_slow.sum()))
    return np.maximum(values, 0.01)


@pytest.mark.slow(kept=["0.05"])
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_no_alarm_in_20_stationary_runs(noise: float) -> None:
    assert [change_points(stationary(seed, noise)) for seed in range(20)] == [()] * 20


@pytest.mark.slow(kept=["1.3-0.02"])
@pytest.mark.parametrize("noise", [0.005, 0.02])
@pytest.mark.parametrize("shift", [0.8, 1.15, 1.3])
def test_injected_change_is_found_where_it_is(noise: float, shift: float) -> None:
    for seed in range(10):
        values = stationary(seed, noise)
        place = int(np.random.default_rng(1000 + seed).integers(40, 360))
        values[place:] *= shift

        (found,) = change_points(values)

        assert abs(found.place - place) <= 2
        assert found.posterior > 0.9
        assert found.shift == pytest.approx(shift - 1.0, abs=0.03)
        assert found.seen_at <= place + 2 * MIN_POINTS


def test_small_and_brief_changes_are_ignored() -> None:
    small, brief = stationary(0, 0.005), stationary(4, 0.01)
    small[200:] *= 1.07
    brief[150:154] *= 3.0

    assert change_points(small) == (), "less than 10 %"
    assert change_points(brief) == (), "four slow steps in a row"


def test_change_and_its_reversal_are_found() -> None:
    values = stationary(3, 0.02)
    values[100:200] *= 1.4

    up, down = change_points(values)

    assert (abs(up.place - 100) <= 2, abs(down.place - 200) <= 2) == (True, True)
    assert up.shift == pytest.approx(0.4, abs=0.03)
    assert down.after == pytest.approx(1.0, abs=0.03)


def test_gradual_decline_is_reported_at_a_tenth() -> None:
    values = stationary(5, 0.01, 600) * np.linspace(1.0, 1.35, 600)

    found = change_points(values)

    assert len(found) >= 2
    assert all(one.shift >= 0.1 for one in found)


def test_short_and_constant_series_have_no_change() -> None:
    for values in ([], [1.0], [1.0] * 11, [1.0] * 300):
        assert change_points(np.array(values)) == (), len(values)


def test_change_in_a_series_without_noise() -> None:
    (found,) = change_points(np.array([0.1] * 50 + [0.13] * 50))

    assert (found.place, found.before, found.after) == (50, pytest.approx(0.1), pytest.approx(0.13))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_values_that_are_no_times_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite, positive"):
        change_points(np.array([1.0, bad]))


def test_trend_of_a_line_in_noise() -> None:
    places = np.arange(0.0, 3000.0, 10.0)
    values = 1.0 + 2e-4 * places + 0.05 * np.random.default_rng(0).standard_normal(len(places))
    values[::17] = 9.0  # outliers

    found = trend(places, values)

    assert found is not None
    assert found.per_1000 == pytest.approx(0.2, rel=0.05)
    assert found.is_rising
    assert not found.is_falling


def test_no_trend_in_noise_nor_in_a_constant() -> None:
    for seed in range(20):
        found = trend(np.arange(300.0), 1.0 + 0.1 * np.random.default_rng(seed).standard_normal(300))
        assert found is not None
        assert (found.is_rising, found.is_falling) == (False, False)
    flat = trend(np.arange(1000.0), np.ones(1000))
    assert flat is not None
    assert (flat.per_1000, flat.certainty) == (0.0, 0.0)


def test_no_trend_of_too_few_points_or_of_one_place() -> None:
    assert trend(np.arange(7.0), np.arange(7.0)) is None
    assert trend(np.zeros(9), np.arange(9.0)) is None


RANDOM = np.random.default_rng(3)
CASES: dict[str, NDArray[Any]] = {
    "one value": np.array([[7.0]]),
    "even": RANDOM.normal(size=(5, 8)),
    "odd": RANDOM.normal(size=(7, 3)),
    "float32": RANDOM.normal(size=(6, 5)).astype(np.float32),
    "integers": RANDOM.integers(0, 9, (6, 5)),
    "infinite": np.array([[1.0, np.inf, 2.0], [-np.inf, np.inf, 0.0]]),
    "NaN": np.array([[1.0, np.nan, 2.0, 3.0], [4.0, 5.0, 6.0, 8.0]]),
}


@pytest.mark.parametrize("case", CASES)
def test_medians_along_an_axis_are_numpys(case: str) -> None:
    for axis in (0, 1):
        found, expected = medians(CASES[case], axis), np.median(CASES[case], axis=axis)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", [name for name in CASES if name != "NaN"])
def test_median_of_all_values_is_numpys(case: str) -> None:
    assert median(CASES[case]) == pytest.approx(float(np.median(CASES[case])), rel=1e-15)
