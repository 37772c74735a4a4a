"""Hashes and writes images in blocks, on two threads, while the caller fills further blocks.

A block consists of whole pages, which a local file system writes to the disk without a copy: see
checkpoint_format/local_location.py.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from megatrain.checkpoint_format.data_file import ItemHasher
from megatrain.checkpoint_format.location import Sink

BLOCK_BYTES = 2**20
_MAX_RUNNING = 16
"""The maximum number of blocks that wait to be hashed and written. Each file has one more, which is being filled."""


@dataclass(frozen=True, slots=True)
class _RunningBlock:
    block: memoryview
    futures: tuple[Future[None], Future[None]]


class BlockThreads:
    """The two threads, and the blocks of all images that one caller fills. Each thread takes blocks in their order."""

    def __init__(self) -> None:
        self._hashing = ThreadPoolExecutor(1, "hash-blocks")
        self._writing = ThreadPoolExecutor(1, "write-blocks")
        self._running: deque[_RunningBlock] = deque()
        self._free: list[memoryview] = []

    def free_block(self) -> memoryview:
        """Return a block to fill. Waits while too many are running."""
        while self._running and (
            len(self._running) == _MAX_RUNNING or all(future.done() for future in self._running[0].futures)
        ):
            oldest = self._running.popleft()
            wait(oldest.futures)
            self._free.append(oldest.block)
        return self._free.pop() if self._free else memoryview(mmap.mmap(-1, BLOCK_BYTES))

    def start(
        self, block: memoryview, num_bytes: int, hasher: ItemHasher, sink: Sink
    ) -> tuple[Future[None], Future[None]]:
        """Begin to hash and write the first bytes of a block. The block is free again when both are done."""
        content = block[:num_bytes]
        futures = self._hashing.submit(hasher.update, content), self._writing.submit(sink.write, content)
        self._running.append(_RunningBlock(block, futures))
        return futures

    def close(self) -> None:
        """Wait for all blocks, and end the threads."""
        self._hashing.shutdown()
        self._writing.shutdown()


class BlockWriter:
    """Hashes and writes one image."""

    def __init__(self, hasher: ItemHasher, sink: Sink, threads: BlockThreads) -> None:
        self._hasher = hasher
        self._sink = sink
        self._threads = threads
        self._block: memoryview | None = None
        self._num_filled = 0
        self._futures: deque[Future[None]] = deque()

    def put(self, part: bytes | memoryview) -> None:
        """Append bytes to the image.

        Raises: what hashing or writing earlier bytes raised.
        """
        rest = memoryview(part)
        while len(rest):
            if self._block is None:
                self._block = self._threads.free_block()
            piece = rest[: BLOCK_BYTES - self._num_filled]
            end = self._num_filled + len(piece)
            self._block[self._num_filled : end] = piece
            self._num_filled = end
            rest = rest[len(piece) :]
            if end == BLOCK_BYTES:
                self._start(self._block)
                self._check(Future.done)

    def finish(self) -> None:
        """Wait until all bytes are hashed and written.

        Raises: what hashing or writing raised.
        """
        if self._block is not None:
            self._start(self._block)
        self._check(lambda future: True)

    def abandon(self) -> None:
        """Wait until no thread uses the file any more."""
        wait(self._futures)

    def _start(self, block: memoryview) -> None:
        self._futures += self._threads.start(block, self._num_filled, self._hasher, self._sink)
        self._block, self._num_filled = None, 0

    def _check(self, is_due: Callable[[Future[None]], bool]) -> None:
        while self._futures and is_due(self._futures[0]):
            self._futures[0].result()
            self._futures.popleft()
