"""The small words of messages: values as TOML writes them, lists of alternatives, divisors to propose."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence

MAX_ALTERNATIVES = 8
MAX_VALUE_CHARACTERS = 60
MAX_DECIMAL_BITS = 10_000
"""Python writes no integer of more than 4300 decimal digits; in hexadecimal it writes any."""


def value_text(value: object) -> str:
    """Return `value` as TOML source."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > MAX_DECIMAL_BITS:
        return hex(value)
    if isinstance(value, str):
        # JSON escapes all that TOML wants escaped, except DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(value_text(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {value_text(item)}' for key, item in value.items())}}}"
    return str(value)


def alternatives(texts: Sequence[object]) -> str:
    """Return "a, b or c"."""
    words = [str(text) for text in texts]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def nearest(candidates: Iterable[int], found: int) -> tuple[int, ...]:
    """Return the few candidates closest to `found`, in ascending order."""
    closest = sorted(candidates, key=lambda candidate: (abs(candidate - found), candidate))
    return tuple(sorted(closest[:MAX_ALTERNATIVES]))


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def multiples_around(divisor: int, found: int) -> tuple[int, ...]:
    """Return the positive multiples of `divisor` next to `found`: one below, when there is one, and one above."""
    below = found // divisor * divisor
    return tuple(multiple for multiple in (below, below + divisor) if multiple > 0)


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def setting(key: str, value: object) -> str:
    """Return "key=value" as a message shows it, cut short when the value is long."""
    return f"{key}={shortened(value_text(value))}"


def shortened(text: str) -> str:
    """Return `text`, cut short when it is long."""
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."
