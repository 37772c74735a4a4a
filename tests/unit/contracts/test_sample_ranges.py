"""Ranges of samples as text."""

from __future__ import annotations

from megatrain.contracts.sample_ranges import samples_text


def test_only_the_last_four_ranges_are_shown() -> None:
    ranges = [(10 * number, 10 * number + 5) for number in range(6)]
    assert samples_text(ranges[:2]) == "0 to 4, 10 to 14"
    assert samples_text(ranges) == "20 to 24, 30 to 34, 40 to 44, 50 to 54 and 2 ranges before"
    assert samples_text(ranges[:5]) == "10 to 14, 20 to 24, 30 to 34, 40 to 44 and 1 range before"
    assert samples_text(ranges[:4]) == "0 to 4, 10 to 14, 20 to 24, 30 to 34"
