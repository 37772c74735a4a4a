"""What a process read through its cache of remote data, and what the cache could not keep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

Load = Callable[[int, int], bytes]
"""Returns a range of a file, given the offset and the number of bytes."""


class CacheUse(NamedTuple):
    """Counts since the data were opened.

    hit_bytes: read from the cache. fetched_bytes: read from the storage. evicted_bytes: of files that were removed to
    make room. num_not_stored: blocks and whole files that could not be written, for example to a full disk.
    """

    hit_bytes: int = 0
    fetched_bytes: int = 0
    evicted_bytes: int = 0
    num_not_stored: int = 0

    @classmethod
    def sum(cls, parts: Iterable[CacheUse]) -> Self:
        return cls(*(map(sum, zip(*parts, strict=True))))


class CacheCounter:
    """The use of a cache by the threads of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._use = CacheUse()

    @property
    def use(self) -> CacheUse:
        return self._use

    def add(self, use: CacheUse) -> None:
        with self._lock:
            self._use = CacheUse.sum((self._use, use))

    def counted(self, load: Load) -> Load:
        """Return a function that calls `load` and counts the bytes that it has read."""

        def load_and_count(offset: int, num_bytes: int) -> bytes:
            content = load(offset, num_bytes)
            self.add(CacheUse(fetched_bytes=num_bytes))
            return content

        return load_and_count
