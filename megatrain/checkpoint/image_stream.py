"""One rank's data file from its slot: the image goes by block by block, is hashed and written.

A block is small enough to be still in the processor's cache when it is hashed, and consists of whole pages, which a
local file system gives to the disk without a copy (contracts/location.py). What one file waits for, another uses: see
persist.py for how many are written at once.
"""

from __future__ import annotations

import mmap
import time

from megatrain.checkpoint.data_file import ItemHasher, encode_trailer, trailer_digest
from megatrain.contracts.arena import SealedSnapshot
from megatrain.contracts.arena_layout import SlotState, SlotWords
from megatrain.contracts.arena_plans import RankPlan
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.location import Location, Sink
from megatrain.contracts.manifest import FileEntry

_BLOCK_BYTES = 2**20
_NUM_LOOKS = 20
_LOOK_AGAIN_S = 0.005


def write_data_file(location: Location, slot: SlotReader, plan: RankPlan, snapshot: SealedSnapshot) -> FileEntry:
    """Write a snapshot's image and its trailer to a new file, durably, and return what the manifest says of it.

    Raises: CheckpointError naming the file or the slot; nothing is left of the file then.
    """
    hasher = ItemHasher(plan.items, plan.image_bytes, str(slot.path))
    sink = location.create()
    try:
        _stream(slot, plan.image_bytes, hasher, sink)
        check_unchanged(slot, snapshot)
        trailer = encode_trailer(hasher.finish())
        sink.write(trailer)
        sink.close()
    except BaseException:
        sink.abort()
        raise
    return FileEntry(plan.image_bytes + len(trailer), trailer_digest(trailer))


def check_unchanged(slot: SlotReader, snapshot: SealedSnapshot) -> None:
    """Raises: CheckpointError when the slot holds something else now.

    A newer start of the job may go on from the snapshot as one of its own, or empty the slot. Beside that, a worker
    must leave a slot alone while storage wants it.
    """
    words, found = _told_by(slot)
    for _ in range(_NUM_LOOKS):
        if words.state != SlotState.WRITING or found != snapshot:
            break
        # a worker marks a slot before it changes it, and soon after says what the slot will hold
        time.sleep(_LOOK_AGAIN_S)
        words, found = _told_by(slot)
    read = f"{slot.path}: while snapshot {snapshot.snapshot} of step {snapshot.step} was read from it,"
    if found.round > snapshot.round:
        raise CheckpointError(f"{read} round {found.round} of the job took the slot over")
    if words.state == SlotState.EMPTY:
        raise CheckpointError(f"{read} a newer start of the job, which goes on from storage, emptied the slot")
    if words.state != SlotState.SEALED or found != snapshot:
        raise CheckpointError(
            f"{slot.path}: {words.state.name.lower()}, with snapshot {found.snapshot} of step {found.step}, while"
            f" snapshot {snapshot.snapshot} of step {snapshot.step} was read from it; a worker must leave a slot alone"
            " that storage still wants, so this one is at fault"
        )


def _told_by(slot: SlotReader) -> tuple[SlotWords, SealedSnapshot]:
    words = slot.words()
    return words, SealedSnapshot(words.step, words.round, words.snapshot)


def _stream(slot: SlotReader, num_bytes: int, hasher: ItemHasher, sink: Sink) -> None:
    # not closed here: the traceback of an error holds views of it, and closing would fail in place of that error
    buffer = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
    for offset in range(0, num_bytes, _BLOCK_BYTES):
        block = buffer[: num_bytes - offset]
        slot.read_image_into(offset, block)
        hasher.update(block)
        sink.write(block)
