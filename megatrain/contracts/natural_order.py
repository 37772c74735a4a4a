"""The order of host and job names: numbers in them compare as numbers. Ranks follow this order of hosts."""

from __future__ import annotations

import re

NaturalKey = tuple[tuple[tuple[str, int], ...], str]
_NUMBER = re.compile(r"([0-9]+)")


def natural_order(name: str) -> NaturalKey:
    """Return a sort key that puts host-2 before host-10. No two different names have equal keys."""
    parts = _NUMBER.split(name)
    return tuple(zip(parts[::2], (*(int(number) for number in parts[1::2]), -1), strict=True)), name
