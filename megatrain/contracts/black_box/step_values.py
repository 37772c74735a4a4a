"""Numbers that a step results in, in addition to its spans. A rank writes them to its black box after each step.

In the ring, such a number is a record with the flag VALUE whose operation is a StepValue and whose duration holds the
64 bits of a float. An assigned number of a StepValue is never changed or reused.
"""

from __future__ import annotations

from enum import IntEnum


class StepValue(IntEnum):
    """One kind of number. All except LABEL_TOKENS and SQUARED_LENGTHS are the same on every rank."""

    LOSS = 1
    GRAD_NORM = 2
    TOKENS = 3
    """Tokens of the global batch."""
    LABEL_TOKENS = 4
    """Tokens of this rank's micro-batches that count in the loss."""
    SQUARED_LENGTHS = 5
    """The sum of squares of the documents' lengths in this rank's micro-batches: the cost of attention (OSDI'25)."""
    MODEL_FLOPS = 6
    """Model FLOPs of one rank's part of the step."""
    DEVICE_BYTES = 7
    """The device's peak memory use."""
    PEAK_FLOPS = 8
    """The device's peak FLOPs per second, if known. MODEL_FLOPS, the step's time and this give the MFU."""

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", "-")
