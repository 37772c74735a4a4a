"""A row of the overlap benchmark is measured again because of the machine's state, never because of the overlap."""

from __future__ import annotations

from benchmarks.overlap import OverlapCase, bars_of, is_valid

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
