"""How often a row of the overlap benchmark is measured: the machine's state decides, never the overlap."""

from __future__ import annotations

from benchmarks.overlap import OverlapCase, bars_of, is_known, is_valid

CASE = OverlapCase("two ranks", {"dp_size": 2}, 1, (0.8, 1.08))
ROW = {"free link, ms": 1000.0, "free link after, ms": 1000.0, "communication": 0.5, "hidden": 0.9, "on / ideal": 1.05}


DIFFERENCES = [
    ({}, True, True),
    ({"free link after, ms": 1110.0}, False, True),
    ({"free link after, ms": 890.0}, False, True),
    ({"free link after, ms": 1090.0}, True, True),
    ({"communication": 0.44}, False, True),
    ({"communication": 0.56}, False, True),
    ({"hidden": 0.79}, True, False),
    ({"hidden": 1.5}, True, True),
    ({"on / ideal": 1.09}, True, False),
]
"""Differing figures; whether the row is valid, and whether the overlap is sufficient."""


def test_a_row_is_measured_again_for_the_machine_only() -> None:
    for difference, valid, enough in DIFFERENCES:
        row = {**ROW, **difference}
        machine, *overlapped = bars_of(CASE, row)
        assert is_valid(row) == machine.is_met == valid, difference
        assert all(bar.is_met for bar in overlapped) == enough, difference


def test_turns_end_when_the_ratio_is_known_whatever_it_is() -> None:
    """The standard error of (1 + x, 1, 1 - x) is x / 1.73."""
    for ratio in (0.6, 1.0, 1.2):
        for spread, is_enough in ((0.017, True), (0.018, False)):
            on = [ratio * (1.0 + spread), ratio, ratio * (1.0 - spread)]
            assert is_known(on, [1.0] * 3) == is_enough, (ratio, spread)
            assert is_known([2.0, 3.0, 4.0], [2.0 / on[0], 3.0 / on[1], 4.0 / on[2]]) == is_enough, "turn by turn"
        assert not is_known([ratio] * 2, [1.0] * 2), "two equal turns may be chance"
