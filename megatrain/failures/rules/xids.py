"""NVIDIA's Xid numbers by what they mean for the host (NVIDIA's Xid catalogue).

Listed are those that a program alone can cause, and the clean-up after another one. All others count as the GPU's, its
links' or its firmware's: to keep such a host in a job costs more than to look at it.
"""

from __future__ import annotations

PROGRAM_FAULT = frozenset(
    {
        6, 7,  # invalid or corrupted push buffer
        8,  # the GPU stopped processing
        11, 12, 13,  # graphics engine exception
        24, 25, 26, 27, 28, 29, 30,
        31,  # memory page fault
        32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42,
        43,  # reset channel: the program's fault
        44, 46, 47, 59,
        67, 68, 69, 70, 75, 76, 86,  # engines of the video units and copies
        109,  # context switch timeout
    }
)  # fmt: skip

CLEAN_UP = frozenset({45})
"""The driver ends a program's channels after something else."""


def one_of(numbers: frozenset[int]) -> str:
    """Return a pattern of one of the numbers."""
    return "(?:" + "|".join(map(str, sorted(numbers))) + r")\b"


def none_of(numbers: frozenset[int]) -> str:
    """Return a pattern of any other positive number."""
    return f"(?!{one_of(numbers)})" + r"[1-9]\d{0,2}\b"
