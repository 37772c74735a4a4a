"""The CRC-32 of each block of a large file: a read checks the blocks that it needs, and reads no others.

A block is as large as a page: reading one byte of a mapped file reads that much anyway.
"""

from __future__ import annotations

import zlib
from array import array
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 4096
SUM_DTYPE = np.dtype("<u4")


def num_blocks(num_bytes: int) -> int:
    """Return how many blocks a content of this size has; the last one may be shorter."""
    return -(-num_bytes // BLOCK_BYTES)


def sums_of(content: bytes) -> list[int]:
    """Return the sum of each block of a content."""
    return [zlib.crc32(content[place : place + BLOCK_BYTES]) for place in range(0, len(content), BLOCK_BYTES)]


class SummingWriter:
    """Appends to a file, and keeps the sum of each block of what was appended: 1 byte of memory per 1,024."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sums = array("I")
        self._last = 0
        self._room = BLOCK_BYTES

    def write(self, content: bytes) -> None:
        """Append. Raises: OSError."""
        self._file.write(content)
        rest = memoryview(content)
        while len(rest):
            part, rest = rest[: self._room], rest[self._room :]
            self._last = zlib.crc32(part, self._last)
            self._room -= len(part)
            if self._room == 0:
                self._sums.append(self._last)
                self._last, self._room = 0, BLOCK_BYTES

    def sums(self) -> NDArray[np.uint32]:
        """Return the sums of all blocks up to here, with that of an unfinished last block."""
        last = [self._last] if self._room < BLOCK_BYTES else []
        return np.array([*self._sums, *last], SUM_DTYPE)


class SummedContent:
    """A content and the sums of its blocks."""

    def __init__(self, content: memoryview, sums: NDArray[np.uint32]) -> None:
        self._content = content
        self._sums = sums

    def first_damaged(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> int | None:
        """Return the number of the first block that overlaps with the ranges of bytes and has another sum; None if all
        are right. Shapes: [ranges]; no range is empty."""
        firsts, lasts = starts // BLOCK_BYTES, (ends - 1) // BLOCK_BYTES
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            for block in range(first, last + 1):
                start = block * BLOCK_BYTES
                if zlib.crc32(self._content[start : start + BLOCK_BYTES]) != self._sums[block]:
                    return int(block)
        return None
