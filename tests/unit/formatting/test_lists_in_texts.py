"""Lists of names and of ranks in texts: short ones are complete, long ones say how many are left out."""

from __future__ import annotations

import pytest

from megatrain.formatting import names_text, ranks_text


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b", "c"], "a, b and c"),
        ([1, 2, 3, 4], "1, 2, 3 and 4"),
        (["a", "b", "c", "d", "e"], "a, b, c and 2 more"),
    ],
)
def test_names_beyond_the_limit_are_counted(names: list[object], expected: str) -> None:
    assert names_text(names, 4) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([], ""), ([3], "rank 3"), ([6, 0, 1, 2], "ranks 0-2, 6"), ([6, 0, 1, 2, 9, 8], "ranks 0-2, 6 and 2 more")],
)
def test_ranks_beyond_the_limit_are_counted(ranks: list[int], expected: str) -> None:
    assert ranks_text(ranks, 4) == expected
