"""Plans of steps have the same samples for any number of replicas; ranges of skipped samples."""

from __future__ import annotations

import re
from itertools import chain, count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.files.json_object import JsonObject
from megatrain.contracts.sample_ranges import SampleRanges, merged, position_after, ranges_problem
from megatrain.contracts.step_plan import Dealing, StepPlan, idle_text

RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=4).map(merged)


@settings(derandomize=True)
@given(
    cursor=st.integers(0, 200),
    num_microbatches=st.integers(1, 40),
    micro_batch_size=st.integers(1, 5),
    skipped=RANGES,
    least_slots=st.integers(1, 6),
    has_equal_slots=st.booleans(),
)
def test_replicas_of_any_number_share_the_same_samples(
    cursor: int,
    num_microbatches: int,
    micro_batch_size: int,
    skipped: tuple[tuple[int, int], ...],
    least_slots: int,
    has_equal_slots: bool,
) -> None:
    size = num_microbatches * micro_batch_size
    # The oracle: samples in order, without the skipped ones.
    samples, number = [], cursor
    while len(samples) < size:
        if not any(first <= number < end for first, end in skipped):
            samples.append(number)
        number += 1
    expected = [tuple(samples[first : first + micro_batch_size]) for first in range(0, size, micro_batch_size)]
    for num_replicas in (1, 2, 3, 7, 8, num_microbatches, num_microbatches + 1):
        dealing = Dealing(num_microbatches, num_replicas, least_slots, has_equal_slots)
        plan = StepPlan(cursor, size, micro_batch_size, dealing, skipped)
        slots = [plan.slots(replica) for replica in range(num_replicas)]
        own = [[slot for slot in of_replica if slot] for of_replica in slots]

        assert own == [expected[replica::num_replicas] for replica in range(num_replicas)]
        assert sorted(chain.from_iterable(own)) == expected
        counts = [len(of_replica) for of_replica in slots]
        fewest = max(map(len, own)) if has_equal_slots else 0
        assert counts == [max(len(one), fewest, least_slots) for one in own]
        for of_replica, one in zip(slots, own, strict=True):
            assert of_replica[: len(one)] == one, "empty slots are the last ones"
        assert dealing.max_slots == max(counts)
        assert dealing.has_empty_slots == (counts != [len(one) for one in own])
        assert dealing.idle_share == pytest.approx(1 - num_microbatches / (max(counts) * num_replicas), abs=0)


# micro-batches, replicas, minimum of slots, and the idle fraction; the first six are the losses of the table of elastic
# training
IDLE: list[tuple[tuple[int, int, int], str]] = [
    ((64, 8, 1), ""),
    ((64, 7, 1), "8.6% of the slots are idle: 64 micro-batches for 7 replicas, 9 to 10 each"),
    ((512, 63, 1), "9.7% of the slots are idle: 512 micro-batches for 63 replicas, 8 to 9 each"),
    ((8, 7, 1), "42.9% of the slots are idle: 8 micro-batches for 7 replicas, 1 to 2 each"),
    ((1, 2, 1), "50.0% of the slots are idle: 1 micro-batch for 2 replicas, 0 to 1 each"),
    ((12, 4, 4), "25.0% of the slots are idle: 12 micro-batches for 4 replicas, 3 to 3 each"),
]


def test_share_of_idle_slots_is_reported() -> None:
    for (num_microbatches, num_replicas, least_slots), expected in IDLE:
        assert idle_text(Dealing(num_microbatches, num_replicas, least_slots)) == expected


def test_plans_without_a_valid_assignment_are_refused() -> None:
    message = "global_batch_size=10 is not 3 micro-batches of micro_batch_size=3; use a multiple of micro_batch_size"
    with pytest.raises(ValueError, match=re.escape(message)):
        StepPlan(0, 10, 3, Dealing(3, 2))
    with pytest.raises(ValueError, match="replica 2 is not one of the 2 replicas of this plan"):
        StepPlan(0, 9, 3, Dealing(3, 2)).slots(2)
    message = "order has 3 indices, 2 of them distinct; it must have each of the 3 samples of the step once"
    with pytest.raises(ValueError, match=re.escape(message)):
        StepPlan(0, 3, 1, Dealing(3, 2), order=(0, 1, 1))


def test_samples_are_assigned_in_the_stated_order() -> None:
    plan = StepPlan(10, 6, 2, Dealing(3, 2), skipped=((12, 20),), order=(5, 0, 1, 2, 4, 3))
    assert plan.samples == [10, 11, 20, 21, 22, 23]
    assert [plan.slots(replica) for replica in range(2)] == [[(23, 10), (22, 21)], [(11, 20)]]


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
