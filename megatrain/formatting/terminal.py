"""Make text from other sources safe and short enough for a terminal."""

from __future__ import annotations

import unicodedata

_TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Bidirectional classes of characters that can make a text look like another one."""
_MAX_LINE = 200


def printable(text: str) -> str:
    """Return `text` with every control character except the line feed as an escape, so that a terminal obeys none."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )


def is_control(character: str) -> bool:
    """Return whether a terminal or page would obey a character: controls, line ends, changes of text direction."""
    is_turning = unicodedata.bidirectional(character) in _TURNING
    return is_turning or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def is_seen(character: str) -> bool:
    """Return whether a character is visible."""
    return unicodedata.category(character)[0] not in "CZ"


def short(text: str, longest: int = _MAX_LINE) -> str:
    """Return text on one line, shortened to `longest` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 3] + "..."
