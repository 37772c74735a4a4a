"""Settings of torch and of the CUDA driver that must be made before a worker first uses its GPU.

The allocator's segments grow, so that free memory does not fragment in long runs. Source: torch's notes on CUDA memory
management (expandable_segments).

There are enough hardware queues that unrelated streams do not wait for each other. The CUDA driver maps streams to 8
queues unless CUDA_DEVICE_MAX_CONNECTIONS sets another number. Work of one queue starts in the order of its launches, so
a stream that waits for a peer delays the other streams of its queue. Compute and communication of a rank use up to 12
streams (ADR 0060); copies use a few more. Results never depend on the number of queues. Source: CUDA programming guide,
environment variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE_SEGMENTS = "expandable_segments:True"
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MAX_QUEUES = 32
"""The largest number that the driver accepts."""
NUM_STREAMS = 12
"""The largest number of streams without copies: compute, 3 for collectives, 4 for links, torch's 4 for messages."""


def use_expandable_segments(environment: Mapping[str, str], set_settings: Callable[[str], None]) -> str:
    """Make the allocator grow its segments instead of adding new ones, unless the user has set allocator settings.

    Must be called before the first allocation. Returns a note for the log, or an empty text.
    """
    for name in ALLOCATOR_VARIABLES:
        if environment.get(name):
            return f"torch's allocator has the settings of {name}={environment[name]}"
    set_settings(EXPANDABLE_SEGMENTS)
    return ""


def set_allocator(settings: str) -> None:
    """Apply settings to torch's allocator, through the function that this version of torch has."""
    import torch  # here, because the doctor uses this module where torch is broken

    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(settings)


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
