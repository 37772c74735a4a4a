"""One rank's data file from its slot: the image goes by block by block, hashed and written at the same time.

A reader of the slot, the hash in a thread of its own and the file share three blocks of memory. On a local disk the
kernel is asked to begin with what was written while more comes: left alone it begins at the fsync, and disk and
processors take turns. That gives the page cache back as well, which is the training job's.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Self

from megatrain.checkpoint.data_file import ItemHasher, encode_trailer, trailer_digest
from megatrain.contracts.arena import SealedSnapshot
from megatrain.contracts.arena_layout import SlotState
from megatrain.contracts.arena_plans import RankPlan
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import LocalLocation, Location, Sink
from megatrain.contracts.manifest import FileEntry

_BLOCK_BYTES = 4 * 2**20
_NUM_BLOCKS = 3
_WRITE_BACK_BYTES = 8 * 2**20


def write_data_file(location: Location, slot: SlotReader, plan: RankPlan, snapshot: SealedSnapshot) -> FileEntry:
    """Write a snapshot's image and its trailer to a new file, durably, and return what the manifest says of it.

    Raises: CheckpointError naming the file or the slot; nothing is left of the file then.
    """
    hasher = ItemHasher(plan.items, plan.image_bytes, str(slot.path))
    sink = location.create()
    try:
        with _EarlyWriteBack(location) as write_back:
            _stream(slot, plan.image_bytes, hasher, sink, write_back)
        check_unchanged(slot, snapshot)
        trailer = encode_trailer(hasher.finish())
        sink.write(trailer)
        sink.close()
    except BaseException:
        sink.abort()
        raise
    return FileEntry(plan.image_bytes + len(trailer), trailer_digest(trailer))


def check_unchanged(slot: SlotReader, snapshot: SealedSnapshot) -> None:
    """Raises: CheckpointError when a worker has reused the slot, which it must not while storage wants it."""
    words = slot.words()
    found = SealedSnapshot(words.step, words.round, words.snapshot)
    if words.state != SlotState.SEALED or found != snapshot:
        raise CheckpointError(
            f"{slot.path}: {words.state.name.lower()}, with snapshot {found.snapshot} of step {found.step}, while"
            f" snapshot {snapshot.snapshot} of step {snapshot.step} was read from it; a worker must leave a slot alone"
            " that storage still wants, so this one is at fault"
        )


def _stream(slot: SlotReader, num_bytes: int, hasher: ItemHasher, sink: Sink, write_back: _EarlyWriteBack) -> None:
    buffers = [memoryview(bytearray(min(_BLOCK_BYTES, num_bytes))) for _ in range(_NUM_BLOCKS)]
    hashed: list[Future[None]] = []
    with ThreadPoolExecutor(1, "hash") as pool:
        for number, offset in enumerate(range(0, num_bytes, _BLOCK_BYTES)):
            if number >= _NUM_BLOCKS:
                hashed[number - _NUM_BLOCKS].result()
            block = buffers[number % _NUM_BLOCKS][: num_bytes - offset]
            slot.read_image_into(offset, block)
            hashed.append(pool.submit(hasher.update, block))
            sink.write(block)
            write_back.advance(offset + len(block))
        for future in hashed:
            future.result()


class _EarlyWriteBack:
    """Tells the kernel of a local file that its first bytes may go to the disk. It is a hint: failing costs time."""

    def __init__(self, location: Location) -> None:
        self._file = -1
        self._told = 0
        if isinstance(location, LocalLocation):
            with suppress(OSError):
                self._file = os.open(location.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def advance(self, end: int) -> None:
        if self._file >= 0 and end - self._told >= _WRITE_BACK_BYTES:
            with suppress(OSError):
                os.posix_fadvise(self._file, self._told, end - self._told, os.POSIX_FADV_DONTNEED)
            self._told = end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file >= 0:
            os.close(self._file)
