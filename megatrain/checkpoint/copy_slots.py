"""Slots that a peer fills: the copies that a host keeps for ranks of others, and which of them may go.

Each owner has two, so that a copy that breaks off never costs the last whole one. Their memory is reserved at the start
as that of a host's own slots is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from megatrain.checkpoint.arena_slots import is_same_slot, make_slot
from megatrain.checkpoint.snapshot_offer import PlannedSlot, SnapshotOffer, holds
from megatrain.contracts.arena import Arena, SealedSnapshot, SlotFile
from megatrain.contracts.arena_layout import (
    HEADER_BYTES,
    Persist,
    SlotHeader,
    SlotState,
    SlotWords,
    Word,
    decode_words,
    slot_bytes,
)
from megatrain.contracts.errors import CheckpointError

NUM_COPY_SLOTS = 2


class SlotFiller:
    """A slot that is there, filled by its file: begin, write, seal.

    Raises: CheckpointError naming the file, from every method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise CheckpointError(f"{path}: the slot cannot be opened: {error.strerror}") from error

    def words(self) -> SlotWords:
        """Return what the slot says now."""
        try:
            return decode_words(os.pread(self._file, HEADER_BYTES, 0), str(self.path))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error

    def clear(self) -> None:
        """Give up what is in the slot."""
        self._store(Word.STATE, SlotState.EMPTY)

    def begin(self, offer: SnapshotOffer) -> None:
        """Give up what is in the slot and say what will be."""
        self._store(Word.STATE, SlotState.WRITING)
        self._store(Word.PERSIST, Persist.NONE)
        self._store(Word.STEP, offer.step)
        self._store(Word.SNAPSHOT, offer.snapshot)
        self._store(Word.ROUND, offer.round)
        self._store(Word.CONSUMED_SAMPLES, offer.consumed_samples)
        self._store(Word.CONSUMED_TOKENS, offer.consumed_tokens)
        self._store(Word.NUM_UPDATES, offer.num_updates)
        self._store(Word.NUM_SKIPPED, offer.num_skipped)
        self._store(Word.SEALED_UNIX_NS, offer.sealed_unix_ns)

    def write(self, offset: int, block: memoryview) -> None:
        """Write a part of the image."""
        self._write(HEADER_BYTES + offset, block)

    def seal(self) -> None:
        """Declare what was written whole."""
        self._store(Word.STATE, SlotState.SEALED)

    def rename(self, before: SealedSnapshot, after: SealedSnapshot, persist: Persist) -> None:
        """Have a sealed snapshot count as one of another round. Nothing happens to a slot that holds another."""
        if not holds(self.words(), before):
            return
        self._store(Word.STATE, SlotState.WRITING)
        self._store(Word.PERSIST, persist)
        self._store(Word.ROUND, after.round)
        self._store(Word.SNAPSHOT, after.snapshot)
        self._store(Word.STATE, SlotState.SEALED)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _store(self, word: Word, value: int) -> None:
        self._write(8 * word, value.to_bytes(8, "little"))

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        try:
            with memoryview(data) as rest:
                done = 0
                while done < len(rest):
                    done += os.pwrite(self._file, rest[done:], offset + done)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from error


def open_copy_slots(arena: Arena, kept: PlannedSlot) -> list[SlotFiller]:
    """Return the slots for the copies of one rank, with their content where they are of its plan, else new ones.

    Raises: CheckpointError naming the file and the room that is missing.
    """
    fillers = []
    for header in _headers(kept):
        path = arena.copy(kept.owner, header.slot)
        if not is_same_slot(path, header):
            make_slot(path, header)
        fillers.append(SlotFiller(path))
    return fillers


def missing_copy_bytes(arena: Arena, kept: PlannedSlot) -> int:
    """Return how much memory these copies take beyond what is there already; those of another plan give way."""
    total = 0
    for header in _headers(kept):
        path = arena.copy(kept.owner, header.slot)
        if not is_same_slot(path, header):
            path.unlink(missing_ok=True)
            total += slot_bytes(kept.image_bytes)
    return total


def slot_to_overwrite(words: Sequence[SlotWords]) -> int:
    """Return the slot whose loss costs least: one without a whole snapshot, else the one with the oldest."""
    return min(
        range(len(words)),
        key=lambda slot: (words[slot].state == SlotState.SEALED, words[slot].snapshot),
    )


def copies_without_use(
    files: Sequence[SlotFile], kept: Collection[int], needed: Collection[int]
) -> tuple[list[SlotFile], list[SlotFile]]:
    """Return the copies that may go now, and those that may go once what they hold was fetched.

    kept: the owners whose copies this host keeps. needed: those whose snapshot is fetched from here.
    """
    unkept = [file for file in files if file.is_copy and file.rank not in kept]
    return [file for file in unkept if file.rank not in needed], [file for file in unkept if file.rank in needed]


def remove_copies(files: Sequence[SlotFile]) -> None:
    """Raises: CheckpointError naming a file that cannot be removed."""
    for file in files:
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{file.path}: cannot be removed: {error.strerror}") from error


def _headers(kept: PlannedSlot) -> list[SlotHeader]:
    digest = bytes.fromhex(kept.plan_digest)
    return [SlotHeader(kept.owner, slot, NUM_COPY_SLOTS, kept.image_bytes, digest) for slot in range(NUM_COPY_SLOTS)]
