"""Write one rank's data file from its slot: read the image block by block, hash each block and write it.

A block is small enough to be still in the CPU's cache when it is hashed. It consists of whole pages, which a
local file system writes to the disk without a copy (checkpoint_format/local_location.py). written_files.py writes
several files at the same time, so that one uses the CPU while another waits for the disk.
"""

from __future__ import annotations

import mmap
import time

from megatrain.arena.plans import RankPlan
from megatrain.arena.slot_file import SlotReader
from megatrain.arena.slot_layout import SealedSnapshot, SlotState, SlotWords
from megatrain.checkpoint_format.data_file import ItemHasher, encode_trailer, trailer_digest
from megatrain.checkpoint_format.location import Location, Sink
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.contracts.errors import CheckpointError

_BLOCK_BYTES = 2**20
_NUM_TRIES = 20
_TRY_AGAIN_S = 0.005


def write_data_file(location: Location, slot: SlotReader, plan: RankPlan, snapshot: SealedSnapshot) -> FileEntry:
    """Write a snapshot's image and its trailer durably to a new file, and return the manifest's entry for it.

    Raises: CheckpointError naming the file or the slot; the file is removed then.
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
    """Raises: CheckpointError when the slot no longer holds this snapshot.

    A newer start of the job may adopt the snapshot under its own round, or empty the slot. Apart from that, a worker
    must not change a slot while its snapshot waits to be written.
    """
    words, found = _words_of(slot)
    for _ in range(_NUM_TRIES):
        if words.state != SlotState.WRITING or found != snapshot:
            break
        # a worker marks a slot before it changes it, and writes the new label shortly after
        time.sleep(_TRY_AGAIN_S)
        words, found = _words_of(slot)
    read = f"{slot.path}: while snapshot {snapshot.snapshot} of step {snapshot.step} was read from it,"
    if found.round > snapshot.round:
        raise CheckpointError(f"{read} round {found.round} of the job took the slot over")
    if words.state == SlotState.EMPTY:
        raise CheckpointError(f"{read} a newer start of the job, which continues from storage, emptied the slot")
    if words.state != SlotState.SEALED or found != snapshot:
        raise CheckpointError(
            f"{slot.path}: {words.state.name.lower()}, with snapshot {found.snapshot} of step {found.step}, while"
            f" snapshot {snapshot.snapshot} of step {snapshot.step} was read from it; a worker must not change a slot"
            " whose snapshot is still being stored, so this worker has a bug"
        )


def _words_of(slot: SlotReader) -> tuple[SlotWords, SealedSnapshot]:
    words = slot.words()
    return words, SealedSnapshot(words.step, words.round, words.snapshot)


def _stream(slot: SlotReader, num_bytes: int, hasher: ItemHasher, sink: Sink) -> None:
    # not closed here: an error's traceback holds views of the buffer, so closing would raise and hide that error
    buffer = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
    for offset in range(0, num_bytes, _BLOCK_BYTES):
        block = buffer[: num_bytes - offset]
        slot.read_contents_into(offset, block)
        hasher.update(block)
        sink.write(block)
