"""Hashes and writes an image in blocks, on other threads, while the caller fills the next block.

A block consists of whole pages, which a local file system writes to the disk without a copy (contracts/location.py).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait

from megatrain.checkpoint.data_file import ItemHasher
from megatrain.contracts.location import Sink

BLOCK_BYTES = 4 * 2**20


class BlockWriter:
    """Copies what it is given into one of two blocks; the other one is hashed and written meanwhile."""

    def __init__(self, hasher: ItemHasher, sink: Sink, executor: Executor) -> None:
        """executor: runs two calls at a time; several writers that one thread calls may share it."""
        self._hasher = hasher
        self._sink = sink
        self._executor = executor
        self._blocks = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(2)]
        self._num_filled = 0
        """Bytes in the first block."""
        self._running: Sequence[Future[None]] = ()

    def put(self, part: bytes | memoryview) -> None:
        """Append bytes to the image.

        Raises: what hashing or writing an earlier block raised.
        """
        rest = memoryview(part)
        while len(rest):
            piece = rest[: BLOCK_BYTES - self._num_filled]
            end = self._num_filled + len(piece)
            self._blocks[0][self._num_filled : end] = piece
            self._num_filled = end
            rest = rest[len(piece) :]
            if end == BLOCK_BYTES:
                self._start()

    def finish(self) -> None:
        """Return when all bytes are hashed and written.

        Raises: what hashing or writing raised.
        """
        if self._num_filled:
            self._start()
        self._complete()

    def abandon(self) -> None:
        """Return when no thread uses the image any more."""
        wait(self._running)

    def _start(self) -> None:
        self._complete()
        block = self._blocks[0][: self._num_filled]
        self._running = [self._executor.submit(one, block) for one in (self._hasher.update, self._sink.write)]
        self._blocks.reverse()
        self._num_filled = 0

    def _complete(self) -> None:
        wait(self._running)  # both, also after an error: no thread may read a block that is filled again
        running, self._running = self._running, ()
        for one in running:
            one.result()
