"""Medians are those of numpy, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain_diagnostics.analysis.medians import median, medians

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
