"""Texts: those of other programs cannot control a terminal, and long lists say how many items are left out."""

from __future__ import annotations

import pytest

from megatrain.formatting import names_text, printable, problems_text, ranks_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, caf\u00e9\n", "plain text, caf\u00e9\n"),
        ("evil\x1b]0;pwned\x07\x1b[2J", "evil\\x1b]0;pwned\\x07\\x1b[2J"),
        ("a\x00b\rc\x9bd", "a\\x00b\\rc\\x9bd"),
        ("\u202eright to left", "\\u202eright to left"),
    ],
)
def test_a_terminal_obeys_nothing_but_the_line_feed(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b", "c"], "a, b and c"),
        (["a", "b", "c", "d", "e"], "a, b, c and 2 more"),
    ],
)
def test_names_beyond_the_limit_are_counted(names: list[str], expected: str) -> None:
    assert names_text(names, 4) == expected


def test_problems_beyond_the_limit_are_counted() -> None:
    assert [problems_text(list("abcd")[:count], 2) for count in range(5)] == [
        "", "a", "a; b", "a; b; and 1 more", "a; b; and 2 more",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([], ""), ([3], "rank 3"), ([6, 0, 1, 2], "ranks 0-2, 6"), ([6, 0, 1, 2, 9, 8], "ranks 0-2, 6 and 2 more")],
)
def test_ranks_beyond_the_limit_are_counted(ranks: list[int], expected: str) -> None:
    assert ranks_text(ranks, 4) == expected
