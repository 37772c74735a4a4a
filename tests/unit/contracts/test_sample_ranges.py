"""Ranges of skipped samples: compared with counting them one by one, and as read from files."""

from __future__ import annotations

from itertools import count, islice

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.files.json_object import JsonObject
from megatrain.contracts.sample_ranges import SampleRanges, merged, position_after, ranges_problem

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5)


@pytest.mark.slow
@given(pairs=PAIRS)
def test_merged_ranges_hold_the_same_samples(pairs: list[tuple[int, int]]) -> None:
    found = merged(pairs)
    assert ranges_problem(found) is None
    samples = [number for first, end in found for number in range(first, end)]
    assert samples == sorted({number for first, end in pairs for number in range(first, end)})
    assert merged(found) == found


@settings(max_examples=50)
@given(pairs=PAIRS, cursor=st.integers(0, 45), counts=st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_positions_are_those_of_counting(pairs: list[tuple[int, int]], cursor: int, counts: list[int]) -> None:
    skipped = merged(pairs)
    gone = {number for first, end in skipped for number in range(first, end)}
    kept = list(islice((number for number in count(cursor) if number not in gone), max(counts) + 1))
    expected = [kept[one] for one in counts]
    assert [position_after(cursor, one, skipped) for one in counts] == expected


def test_invalid_ranges_are_refused() -> None:
    invalid: list[SampleRanges] = [((3, 3),), ((-1, 2),), ((1, 4), (4, 6)), ((5, 6), (1, 2)), ((0, 2**62),)]
    for ranges in invalid:
        assert ranges_problem(ranges) is not None, ranges
        raw = {"skipped": [list(one) for one in ranges]}
        with pytest.raises(CheckpointError, match=r"the-file: skipped=.*; expected ranges"):
            JsonObject(raw, "the-file", 1).sample_ranges("skipped")
    for malformed in (7, "1-2", [1, 2], [[1]], [[1, 2, 3]], [[True, 2]], [[1.0, 2]], [None], {}):
        with pytest.raises(CheckpointError, match=r"the-file: skipped=.*; expected a list of \[first, end\]"):
            raise AssertionError(JsonObject({"skipped": malformed}, "the-file", 1).sample_ranges("skipped"))


def test_missing_field_means_no_ranges() -> None:
    assert JsonObject({}, "the-file", 1).sample_ranges("skipped") == ()
    assert JsonObject({"skipped": [[1, 4], [6, 8]]}, "the-file", 1).sample_ranges("skipped") == ((1, 4), (6, 8))
