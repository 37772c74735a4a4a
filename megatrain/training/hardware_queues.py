"""The GPU's hardware queues: enough of them that unrelated streams do not wait for each other.

The CUDA driver maps streams to 8 queues unless CUDA_DEVICE_MAX_CONNECTIONS sets another number. Work of one queue
starts in the order of its launches, so a stream that waits for a peer delays the other streams of its queue. A rank
uses up to 12 streams (ADR 0060). Results never depend on the number of queues. Source: CUDA programming guide,
environment variables.
"""

from __future__ import annotations

from collections.abc import MutableMapping

QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MAX_QUEUES = 32
"""The largest number that the driver accepts."""
NUM_STREAMS = 12
"""The largest number of streams of a rank: compute, 3 for collectives, 4 for links, and torch's 4 for messages."""


def use_all_queues(environment: MutableMapping[str, str]) -> str:
    """Request all hardware queues, unless the user has set their number. Must be called before CUDA starts.

    Returns a note for the log if the user's number is too small, else an empty text.
    """
    number = environment.setdefault(QUEUES_VARIABLE, str(MAX_QUEUES))
    return queues_warning(number)


def queues_warning(number: str) -> str:
    """Return why this value of the variable makes streams wait for each other, or an empty text."""
    if not number.isdecimal() or int(number) >= NUM_STREAMS:
        return ""
    return (
        f"{QUEUES_VARIABLE}={number} makes streams of a GPU wait for each other: communication overlaps less with "
        f"compute. megatrain does not need this setting; unset it, or use {MAX_QUEUES}"
    )
