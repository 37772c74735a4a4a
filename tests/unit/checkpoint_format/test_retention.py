"""The checkpoints that retention removes: a table of examples, and properties that hold for all numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.checkpoint_format.retention import to_remove

STEPS = [10, 20, 30, 40, 50]


EXAMPLES: list[tuple[int, int, set[int], set[int], list[int]]] = [
    (0, 0, set(), set(), []),
    (0, 20, set(), set(), []),
    (1, 0, set(), set(), [10, 20, 30, 40]),
    (2, 0, set(), set(), [10, 20, 30]),
    (5, 0, set(), set(), []),
    (9, 0, set(), set(), []),
    (1, 20, set(), set(), [10, 30]),
    (1, 7, set(), set(), [10, 20, 30, 40]),
    (1, 1, set(), set(), []),
    (1, 0, {20}, {30}, [10, 40]),
    (1, 0, {99}, {98}, [10, 20, 30, 40]),
]


def test_examples_of_what_is_removed() -> None:
    for keep_last, keep_every, pinned, needed, removed in EXAMPLES:
        found = to_remove(STEPS, pinned, needed, keep_last, keep_every)
        assert found == removed, (keep_last, keep_every, pinned, needed)
    assert to_remove([], set(), set(), 1, 0) == []
    assert to_remove([7], set(), set(), 1, 0) == []
    assert to_remove([0, 1, 2], set(), set(), 1, 5) == [1]
    for keep_last, keep_every in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match=f"keep_last={keep_last} and keep_every={keep_every} must be at least 0"):
            to_remove(STEPS, set(), set(), keep_last, keep_every)


SOME_STEPS = st.lists(st.integers(0, 60), max_size=20)
SOME = st.frozensets(st.integers(0, 60), max_size=8)


@settings(max_examples=100, derandomize=True)
@given(SOME_STEPS, SOME, SOME, st.integers(0, 8), st.integers(0, 12))
def test_a_step_goes_exactly_when_no_rule_keeps_it(
    steps: list[int], pinned: frozenset[int], needed: frozenset[int], keep_last: int, keep_every: int
) -> None:
    removed = to_remove(steps, pinned, needed, keep_last, keep_every)
    assert removed == sorted(set(removed))
    for step in set(steps):
        num_newer = len({other for other in steps if other > step})
        is_kept = keep_last == 0 or num_newer < keep_last or step in pinned | needed
        is_kept = is_kept or (keep_every > 0 and step % keep_every == 0)
        assert (step in removed) is not is_kept
    assert set(removed) <= set(steps)
    if steps:
        assert max(steps) not in removed


@pytest.mark.slow
@settings(max_examples=200, derandomize=True)
@given(SOME_STEPS, SOME, SOME, st.integers(0, 8), st.integers(0, 12))
def test_repeated_or_interrupted_removal_has_one_result(
    steps: list[int], pinned: frozenset[int], needed: frozenset[int], keep_last: int, keep_every: int
) -> None:
    removed = to_remove(steps, pinned, needed, keep_last, keep_every)
    kept = sorted(set(steps) - set(removed))
    assert to_remove(kept, pinned, needed, keep_last, keep_every) == []
    # The next removal completes an interrupted one, whatever was saved meanwhile.
    newer = max(steps, default=0) + 1
    later = to_remove([*steps, newer], pinned, needed, keep_last, keep_every)
    assert set(removed) <= set(later)
    left = removed[len(removed) // 2 :]
    after_a_part = to_remove([*kept, *left, newer], pinned, needed, keep_last, keep_every)
    assert set(after_a_part) == set(later) - set(removed[: len(removed) // 2])
