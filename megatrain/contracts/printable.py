"""Text that somebody else wrote, made fit for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` with every character that a terminal would obey, but the line feed, written as an escape."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )
