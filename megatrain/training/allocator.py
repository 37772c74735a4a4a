"""Settings of torch's allocator for long runs on a GPU: segments grow, so that free memory does not fragment.

Source: torch's notes on CUDA memory management (expandable_segments).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE_SEGMENTS = "expandable_segments:True"


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
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(settings)
