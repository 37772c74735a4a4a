"""Format counts, sizes, times, lists and untrusted text for people, the same in logs, commands and pages.

Pure functions: no I/O and no clock. Imports nothing from megatrain.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

_DIRECTION_CHANGES = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Bidirectional classes of characters that change the text direction, and so can disguise a text."""
_MAX_LINE = 200


def count_text(number: int, one: str, many: str = "") -> str:
    """Return "1 host" or "1,250 hosts"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def bytes_text(num_bytes: int) -> str:
    """Return "1.23 GB". Units are powers of 1000, like those of disks."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{num_bytes} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} PB"


def seconds_text(seconds: float) -> str:
    """Return a duration: "80 ms", "3.2 s", "12 min", "3 h 12 min"."""
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, hours, days = round(seconds / 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 60:
        return f"{minutes} min"
    return f"{hours} h {int(seconds // 60) % 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def age_text(unix_s: float, now_s: float) -> str:
    """Return the age of a moment in whole seconds, or in larger units: "3 s", "12 min"."""
    age_s = max(0.0, now_s - unix_s)
    return f"{age_s:.0f} s" if age_s < 59.5 else seconds_text(age_s)


def time_text(unix_s: float) -> str:
    """Return a moment as UTC."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # the time is out of range, as from a host with a wrong clock
        return f"{unix_s:.0f} s after 1970"


def ranks_text(ranks: Iterable[int], most: int = 64) -> str:
    """Return "rank 3" or "ranks 0-3, 6"; "" for no ranks. Beyond `most` ranks, the others are counted."""
    ordered = sorted(set(ranks))
    more = f" and {len(ordered) - most:,} more" if len(ordered) > most else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {ranges_text(ordered[:most])}{more}" if ordered else ""


def ranges_text(numbers: Iterable[int]) -> str:
    """Return "0-3, 6"."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def names_text(names: Sequence[str], most: int = 8) -> str:
    """Return "a, b and c". For more than `most` names, return the first ones and the number of the others."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1:,} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def problems_text(problems: Sequence[str], most: int) -> str:
    """Return "a; b". For more than `most` problems, return the first ones and the number of the others."""
    more = [f"and {len(problems) - most:,} more"] if len(problems) > most else []
    return "; ".join([*problems[:most], *more])


def alternatives(texts: Sequence[object]) -> str:
    """Return "a, b or c"."""
    items = [str(text) for text in texts]
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} or {items[-1]}"


def printable(text: str) -> str:
    """Return `text` with unprintable characters except line feeds escaped, so that none controls a terminal."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode a text: JSON, and command-line bytes of another encoding, may contain lone
    surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_control(character: str) -> bool:
    """Return whether a character controls a terminal or page: control codes, line ends, changes of text direction."""
    is_turning = unicodedata.bidirectional(character) in _DIRECTION_CHANGES
    return is_turning or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def is_visible(character: str) -> bool:
    """Return whether a character is visible."""
    return unicodedata.category(character)[0] not in "CZ"


def short(text: str, longest: int = _MAX_LINE) -> str:
    """Return text on one line, shortened to `longest` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 3] + "..."
