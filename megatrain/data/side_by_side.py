"""Reads of many files at the same time: requests to object storage take long and compute nothing, and the digests of
local files are computed without Python's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MOST_THREADS = 16
"""Requests that a process sends at the same time."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def side_by_side(
    action: Callable[[_Item], _Result], items: Sequence[_Item], most_threads: int = MOST_THREADS
) -> list[_Result]:
    """Return the result of a read for each item. Where no thread can be started, they are read one after the other.

    most_threads: for reads that compute, at most as many as there are cores; more would wait for Python's lock.
    Raises: the error of the first item that has one.
    """
    if len(items) < 2:
        return [action(item) for item in items]
    with ThreadPoolExecutor(min(len(items), most_threads), "data-fetch") as threads:
        try:
            results = [threads.submit(action, item) for item in items]
        except RuntimeError:  # no thread can be started; errors of the action are raised by result()
            results = []
    return [one.result() for one in results] or [action(item) for item in items]
