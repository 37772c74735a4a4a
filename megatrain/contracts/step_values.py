"""Numbers that a step comes to, beside its spans: what a rank writes to its black box when it has completed a step.

In the ring such a number is a record with the flag VALUE whose operation is a StepValue and whose duration holds the
64 bits of a float. A number, once given, is never changed or used again.
"""

from __future__ import annotations

from enum import IntEnum


class StepValue(IntEnum):
    """One kind of number. All but LABEL_TOKENS and SQUARED_LENGTHS are the same on every rank."""

    LOSS = 1
    GRAD_NORM = 2
    TOKENS = 3
    """Of the global batch."""
    LABEL_TOKENS = 4
    """Of this rank's micro-batches, those that count in the loss."""
    SQUARED_LENGTHS = 5
    """The sum of squares of the documents' lengths in this rank's micro-batches: what attention costs (OSDI'25)."""
    MODEL_FLOPS = 6
    """Of one rank's share of the step."""
    DEVICE_BYTES = 7
    """Most memory that the device had in use."""
    PEAK_FLOPS = 8
    """That a device could do in a second, where it is known: with MODEL_FLOPS and the time of the step this is MFU."""

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", "-")
