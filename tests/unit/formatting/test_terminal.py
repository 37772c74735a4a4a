"""Text from other programs cannot control a terminal."""

from __future__ import annotations

import pytest

from megatrain.formatting import printable


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
