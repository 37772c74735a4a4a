"""This rank's mapped slots in the host's arena. A rank copies its snapshots there, and a warm restore reads them.

Memory is reserved when a slot is made, because a store into a full tmpfs would kill the process with SIGBUS; the
caller computes beforehand whether it fits. Each page is touched once, so that no snapshot waits for the kernel to clear
it. With a GPU, the pages are pinned, so that a copy from the device runs at full speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.arena.directory import Arena
from megatrain.arena.slot_file import is_same_slot, make_slot, missing_bytes
from megatrain.arena.slot_layout import (
    HEADER_BYTES,
    Persist,
    SlotHeader,
    SlotState,
    SlotWord,
    SlotWords,
    decode_words,
    slot_bytes,
)
from megatrain.checkpoint.image import MAX_ITEM_BYTES, BoundImage, ImagePlan, plan_image
from megatrain.checkpoint.ownership import SavedShard, divide
from megatrain.contracts.errors import CheckpointError

_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotPlan:
    """The parts of a slot's contents: the state in the rank's own data file, then the state that other ranks write.

    Each part is laid out as an image.
    """

    file: ImagePlan
    rest: ImagePlan

    @property
    def num_bytes(self) -> int:
        return self.file.num_bytes + self.rest.num_bytes

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.file.digest + self.rest.digest).digest()


def plan_snapshot(shards: Sequence[SavedShard], max_item_bytes: int = MAX_ITEM_BYTES) -> SnapshotPlan:
    """Lay out the snapshot of one rank's state. The same state gives the same plan in another process."""
    owned, others = divide(shards)
    parts = [[(saved.kind, saved.shard) for saved in part] for part in (owned, others)]
    return SnapshotPlan(*(plan_image(part, max_item_bytes) for part in parts))


@dataclass(frozen=True, slots=True)
class SnapshotLabel:
    """The fields of a slot's header that describe its snapshot."""

    step: int
    round: int
    consumed_samples: int
    consumed_tokens: int
    num_updates: int
    num_skipped: int


class ArenaSlot:
    """One mapped slot of one rank. A snapshot takes four steps: begin, copy, agreement of all ranks, seal."""

    def __init__(self, path: Path, header: SlotHeader, plan: SnapshotPlan, *, is_pinned: bool) -> None:
        self.path = path
        is_new = not is_same_slot(path, header)
        if is_new:
            make_slot(path, header)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(file, slot_bytes(header.contents_bytes))
        finally:
            os.close(file)
        with contextlib.suppress(OSError):  # an older kernel clears pages at the first snapshot
            self._map.madvise(_MADV_POPULATE_WRITE)
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        self._contents = memoryview(self._map)[HEADER_BYTES:]
        self._pinned: int | None = _pin(self._contents) if is_pinned else None
        end = plan.file.num_bytes
        self._parts = (BoundImage(plan.file, self._contents[:end]), BoundImage(plan.rest, self._contents[end:]))
        if is_new:
            for part in self._parts:
                part.write_envelopes()

    def words(self) -> SlotWords:
        """Return the slot's current header words."""
        return decode_words(bytes(self._words.cast("B")), str(self.path))

    def is_free(self) -> bool:
        """Return whether a new snapshot may overwrite the slot: its contents do not wait to be stored."""
        return self._words[SlotWord.STATE] != SlotState.SEALED or self._words[SlotWord.PERSIST] != Persist.PENDING

    def persist_of(self, number: int) -> Persist | None:
        """Return the storage state of snapshot `number`, None when the slot does not hold it completely."""
        words = self.words()
        return words.persist if words.sealed is not None and words.snapshot == number else None

    def give_up(self) -> None:
        """Mark the snapshot as one that will not be stored."""
        self._words[SlotWord.PERSIST] = Persist.FAILED

    def clear(self) -> None:
        """Discard the slot's contents."""
        self._words[SlotWord.STATE] = SlotState.EMPTY

    def begin(self, label: SnapshotLabel, number: int) -> None:
        """Discard the slot's contents and label the slot for snapshot `number` of the job."""
        words = self._words
        words[SlotWord.STATE] = SlotState.WRITING
        words[SlotWord.PERSIST] = Persist.NONE
        words[SlotWord.STEP] = label.step
        words[SlotWord.SNAPSHOT] = number
        words[SlotWord.ROUND] = label.round
        words[SlotWord.CONSUMED_SAMPLES] = label.consumed_samples
        words[SlotWord.CONSUMED_TOKENS] = label.consumed_tokens
        words[SlotWord.NUM_UPDATES] = label.num_updates
        words[SlotWord.NUM_SKIPPED] = label.num_skipped

    def copy_out(self) -> None:
        """Copy the state into the slot. Returns when the state may change again."""
        for part in self._parts:
            part.copy_out()

    def copy_in(self) -> None:
        """Copy the slot's contents into the state."""
        for part in self._parts:
            part.copy_in()

    def seal(self) -> None:
        """Mark the snapshot as complete on all ranks. The writer process then stores it."""
        words = self._words
        words[SlotWord.SEALED_UNIX_NS] = time.time_ns()
        words[SlotWord.PERSIST] = Persist.PENDING
        words[SlotWord.STATE] = SlotState.SEALED

    def close(self) -> None:
        """Release the memory; the file stays."""
        for part in self._parts:
            part.release()
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
        self._contents.release()
        self._words.release()
        self._map.close()


def open_slots(arena: Arena, rank: int, num_slots: int, plan: SnapshotPlan, *, is_pinned: bool) -> list[ArenaSlot]:
    """Return this rank's slots. A slot of the same plan keeps its contents; others are replaced.

    Raises: CheckpointError naming the file and the missing memory, or when CUDA cannot pin the memory.
    """
    headers = _headers(rank, num_slots, plan)
    return [ArenaSlot(arena.slot(rank, header.slot), header, plan, is_pinned=is_pinned) for header in headers]


def missing_slot_bytes(arena: Arena, rank: int, num_slots: int, plan: SnapshotPlan) -> int:
    """Return how many bytes this rank's slots need that do not exist yet. Slots of another plan are removed.

    Raises: CheckpointError naming a slot that cannot be removed.
    """
    return missing_bytes((arena.slot(rank, header.slot), header) for header in _headers(rank, num_slots, plan))


def _headers(rank: int, num_slots: int, plan: SnapshotPlan) -> list[SlotHeader]:
    return [SlotHeader(rank, slot, num_slots, plan.num_bytes, plan.digest) for slot in range(num_slots)]


def _pin(view: memoryview) -> int:
    """Register memory with CUDA and return its address."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    status = torch.cuda.cudart().cudaHostRegister(address, len(view), 0)
    if int(status) != 0:
        raise CheckpointError(f"cudaHostRegister of {len(view)} bytes of the arena failed with {status}")
    return address
