"""Text that somebody else wrote, made fit for a terminal."""

from __future__ import annotations

import unicodedata

_TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Classes of characters by which a text looks like another one."""


def printable(text: str) -> str:
    """Return `text` with every character that a terminal would obey, but the line feed, written as an escape."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )


def is_control(character: str) -> bool:
    """Tell what a terminal or a page would obey: controls, line ends, and what turns the direction of a text."""
    is_turning = unicodedata.bidirectional(character) in _TURNING
    return is_turning or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def is_seen(character: str) -> bool:
    """Tell whether a character shows."""
    return unicodedata.category(character)[0] not in "CZ"
