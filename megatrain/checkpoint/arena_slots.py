"""This rank's slots in the host's arena, mapped: where stage 1 puts a snapshot, and where a warm restore finds it.

Memory is reserved when a slot is made, because a store into a full tmpfs would kill the process with SIGBUS; whether it
fits is asked before, with the arithmetic. Pages are touched once, so that no snapshot waits for the kernel to clear
them; with a GPU they are pinned, so that a copy from the device runs at full speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.checkpoint.image import MAX_ITEM_BYTES, ImagePlan, plan_image
from megatrain.checkpoint.ownership import SavedShard, divide
from megatrain.contracts.arena import Arena, SealedSnapshot
from megatrain.contracts.arena_layout import (
    HEADER_BYTES,
    Persist,
    SlotHeader,
    SlotState,
    SlotWords,
    Word,
    decode_header,
    decode_words,
    encode_header,
    slot_bytes,
)
from megatrain.contracts.errors import CheckpointError

_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotPlan:
    """What a slot's image is made of: the rank's file, and after it the state that a copy's file has."""

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
    parts = [[(one.kind, one.shard) for one in part] for part in (owned, others)]
    return SnapshotPlan(*(plan_image(part, max_item_bytes) for part in parts))


@dataclass(frozen=True, slots=True)
class SnapshotLabel:
    """What a slot says of the snapshot in it."""

    step: int
    round: int
    consumed_samples: int
    consumed_tokens: int
    num_updates: int
    num_skipped: int


class ArenaSlot:
    """One mapped slot of one rank. A snapshot is: begin, copy, all ranks agree, seal."""

    def __init__(self, path: Path, header: SlotHeader, plan: SnapshotPlan, *, is_pinned: bool) -> None:
        self.path = path
        self.was_there = is_same_slot(path, header)
        if not self.was_there:
            make_slot(path, header)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(file, slot_bytes(header.image_bytes))
        finally:
            os.close(file)
        with contextlib.suppress(OSError):  # an older kernel clears pages at the first snapshot
            self._map.madvise(_MADV_POPULATE_WRITE)
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        self._image_view = memoryview(self._map)[HEADER_BYTES:]
        self._pinned: int | None = _pin(self._image_view) if is_pinned else None
        end = plan.file.num_bytes
        self._parts = (plan.file.bind(self._image_view[:end]), plan.rest.bind(self._image_view[end:]))
        if not self.was_there:
            for part in self._parts:
                part.write_envelopes()

    def words(self) -> SlotWords:
        """Return what the slot says now."""
        return decode_words(bytes(self._words.cast("B")), str(self.path))

    def holds(self, snapshot: SealedSnapshot) -> bool:
        """Whether this snapshot is in the slot, whole."""
        words = self.words()
        found = SealedSnapshot(words.step, words.round, words.snapshot)
        return words.state == SlotState.SEALED and found == snapshot

    def is_free(self) -> bool:
        """Whether a new snapshot may overwrite what is in the slot: storage has it, or will not get it."""
        return self._words[Word.STATE] != SlotState.SEALED or self._words[Word.PERSIST] != Persist.WANTED

    def clear(self) -> None:
        """Give up what is in the slot."""
        self._words[Word.STATE] = SlotState.EMPTY

    def begin(self, label: SnapshotLabel, number: int) -> None:
        """Give up what is in the slot and say what will be: snapshot `number` of the job."""
        words = self._words
        words[Word.STATE] = SlotState.WRITING
        words[Word.PERSIST] = Persist.NONE
        words[Word.STEP] = label.step
        words[Word.SNAPSHOT] = number
        words[Word.ROUND] = label.round
        words[Word.CONSUMED_SAMPLES] = label.consumed_samples
        words[Word.CONSUMED_TOKENS] = label.consumed_tokens
        words[Word.NUM_UPDATES] = label.num_updates
        words[Word.NUM_SKIPPED] = label.num_skipped

    def copy_out(self) -> None:
        """Copy the state into the slot. Returns when it may change again."""
        for part in self._parts:
            part.copy_out()

    def copy_in(self) -> None:
        """Copy what is in the slot into the state."""
        for part in self._parts:
            part.copy_in()

    def seal(self, *, is_wanted: bool = True) -> None:
        """Declare the snapshot whole: every rank has its own. The writer process takes it from here."""
        words = self._words
        words[Word.SEALED_UNIX_NS] = time.time_ns()
        words[Word.PERSIST] = Persist.WANTED if is_wanted else Persist.NONE
        words[Word.STATE] = SlotState.SEALED

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        for part in self._parts:
            part.release()
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
        self._image_view.release()
        self._words.release()
        self._map.close()


def open_slots(arena: Arena, rank: int, num_slots: int, plan: SnapshotPlan, *, is_pinned: bool) -> list[ArenaSlot]:
    """Return this rank's slots, with their content where they are of the same plan, else new ones.

    Raises: CheckpointError naming the file and the room that is missing.
    """
    headers = [SlotHeader(rank, slot, num_slots, plan.num_bytes, plan.digest) for slot in range(num_slots)]
    return [ArenaSlot(arena.slot(rank, header.slot), header, plan, is_pinned=is_pinned) for header in headers]


def missing_bytes(arena: Arena, rank: int, num_slots: int, plan: SnapshotPlan) -> int:
    """Return how much memory this rank's slots take beyond what is there already; slots of another plan give way."""
    total = 0
    for slot in range(num_slots):
        path, header = arena.slot(rank, slot), SlotHeader(rank, slot, num_slots, plan.num_bytes, plan.digest)
        if not is_same_slot(path, header):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be removed: {error.strerror}; the arena is damaged, remove its directory"
                ) from error
            total += slot_bytes(plan.num_bytes)
    return total


def is_same_slot(path: Path, header: SlotHeader) -> bool:
    """Whether the slot with this header is there."""
    try:
        # whatever else has the name, a FIFO for one, must not make us wait
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            page = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
        return decode_header(page, str(path)) == header and size == slot_bytes(header.image_bytes)
    except (OSError, CheckpointError):
        return False


def make_slot(path: Path, header: SlotHeader) -> None:
    """Make an empty slot; it gets its name when its memory is its own.

    Raises: CheckpointError naming the file and the room that is missing.
    """
    size = slot_bytes(header.image_bytes)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            os.pwrite(file, encode_header(header), 0)
        finally:
            os.close(file)
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise CheckpointError(f"{path}: the slot cannot be made: {error.strerror}") from error
        raise CheckpointError(
            f"{path}: {path.parent.parent} has no room for a slot of {size} bytes; give it more memory, use "
            "checkpoint.slots=1, or name another checkpoint.arena_directory"
        ) from error


def _pin(view: memoryview) -> int:
    """Register memory with CUDA and return its address."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    status = torch.cuda.cudart().cudaHostRegister(address, len(view), 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise CheckpointError(f"cudaHostRegister of {len(view)} bytes of the arena failed with {status}")
    return address
