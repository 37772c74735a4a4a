"""The work of a call: counted, and so the same on a slow or a busy machine, unlike its duration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

MOST_GROWTH = 2.5
"""The bound for twice the size: linear work doubles, quadratic work quadruples."""


def count_work(call: Callable[[], object]) -> int:
    """Return how many instructions of Python a call executes in this thread. Loops within C count as one."""
    num_instructions = 0

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        nonlocal num_instructions
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        num_instructions += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_instructions


def assert_grows_linearly(work_of: Callable[[int], Callable[[], object]], size: int) -> None:
    """Check that a call takes hardly more than twice the work at twice the size. `work_of` returns the call for a
    size."""
    once, twice = (count_work(work_of(number)) for number in (size, 2 * size))
    assert once > 0
    assert twice <= MOST_GROWTH * once, f"{once:,} instructions at {size:,}, {twice:,} at {2 * size:,}"
