"""The rules for items in the image of a data file: in order, each at a multiple of 64, with zeros between them."""

from __future__ import annotations

from collections.abc import Sequence

ITEM_ALIGNMENT = 64
"""Bytes. With this alignment, an item's data can be used in place, in memory and in a mapped file."""


def item_ranges_problem(ranges: Sequence[tuple[int, int]], image_bytes: int) -> str | None:
    """Return the first item whose (offset, length) breaks these rules, as a text; None without one.

    The bytes between the items are not known here, so this function does not check that they are zeros.
    """
    end = 0
    for offset, length in ranges:
        if length < 1 or offset % ITEM_ALIGNMENT:
            return f"an item of {length} bytes at {offset}, expected at least 1 at a multiple of {ITEM_ALIGNMENT}"
        if offset < end:
            return f"an item at {offset}, but the one before ends at {end}"
        end = offset + length
    return f"an item that ends at {end}, after the image's {image_bytes} bytes" if end > image_bytes else None
