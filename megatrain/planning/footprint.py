"""What a part of the model needs in memory for one micro-batch, and how parts in a row add up.

Bytes are counted by moments: a moment is the tensors alive together at one place of the code, and a part's peak is its
largest moment. All numbers are relative to the memory before the part's forward, its input included in `kept`: the
input of a part is kept by the part that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one part. `held`: what its backward leaves behind until the chunk's backward ends."""

    kept: int
    """From its forward to its backward."""
    forward: int
    """Most at once during its forward, with what it keeps."""
    backward: int
    """Most at once during its backward, with what is still kept."""
    held: int = 0


def in_a_row(parts: Sequence[Footprint]) -> Footprint:
    """Return the footprint of parts that run one after the other, backward in reverse order."""
    kept = forward = backward = 0
    # a part that runs later forward runs earlier backward
    held_after = sum(part.held for part in parts)
    for part in parts:
        held_after -= part.held
        forward = max(forward, kept + part.forward)
        backward = max(backward, kept + part.backward + held_after)
        kept += part.kept
    return Footprint(kept, forward, backward, sum(part.held for part in parts))
