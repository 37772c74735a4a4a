"""Large pages for the tensors of conversions, which are written once and freed soon."""

from __future__ import annotations

import os

SWITCH = "THP_MEM_ALLOC_ENABLE"
"""torch's own switch: its CPU allocator asks the kernel for huge pages."""


def use_large_pages() -> None:
    """Let torch use huge pages, unless the environment decides. Call it before torch is imported.

    The first write to each page of 4 KiB costs more than the conversion of its values does.
    """
    os.environ.setdefault(SWITCH, "1")
