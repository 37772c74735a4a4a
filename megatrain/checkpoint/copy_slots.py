"""Slots that a peer fills: the copies that a host keeps for ranks of other hosts, and which of them may be removed.

Each owner has two slots, so that an interrupted copy never destroys the last complete one. Their memory is reserved at
the start, like that of a host's own slots.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from megatrain.arena.directory import Arena, SlotFile
from megatrain.arena.slot_file import is_same_slot, make_slot, missing_bytes
from megatrain.arena.slot_layout import (
    HEADER_BYTES,
    Persist,
    SealedSnapshot,
    SlotHeader,
    SlotState,
    SlotWord,
    SlotWords,
    decode_words,
)
from megatrain.checkpoint.snapshot_offer import PlannedSlot, SnapshotOffer
from megatrain.contracts.errors import CheckpointError

NUM_COPY_SLOTS = 2


class SlotFiller:
    """An existing slot that is filled through file writes, not a mapping: begin, write, seal.

    Raises: CheckpointError naming the file, from every method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise CheckpointError(f"{path}: the slot cannot be opened: {error.strerror}") from error

    def words(self) -> SlotWords:
        """Return the slot's current header words."""
        try:
            return decode_words(os.pread(self._file, HEADER_BYTES, 0), str(self.path))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error

    def clear(self) -> None:
        """Discard the slot's contents."""
        self._store(SlotWord.STATE, SlotState.EMPTY)

    def begin(self, offer: SnapshotOffer) -> None:
        """Discard the slot's contents and label the slot for the offered snapshot."""
        self._store(SlotWord.STATE, SlotState.WRITING)
        self._store(SlotWord.PERSIST, Persist.NONE)
        self._store(SlotWord.STEP, offer.step)
        self._store(SlotWord.SNAPSHOT, offer.snapshot)
        self._store(SlotWord.ROUND, offer.round)
        self._store(SlotWord.CONSUMED_SAMPLES, offer.consumed_samples)
        self._store(SlotWord.CONSUMED_TOKENS, offer.consumed_tokens)
        self._store(SlotWord.NUM_UPDATES, offer.num_updates)
        self._store(SlotWord.NUM_SKIPPED, offer.num_skipped)
        self._store(SlotWord.SEALED_UNIX_NS, offer.sealed_unix_ns)

    def write(self, offset: int, block: memoryview) -> None:
        """Write a part of the contents."""
        self._write(HEADER_BYTES + offset, block)

    def seal(self) -> None:
        """Mark the written contents as complete."""
        self._store(SlotWord.STATE, SlotState.SEALED)

    def relabel(self, before: SealedSnapshot, after: SealedSnapshot, persist: Persist) -> None:
        """Relabel a sealed snapshot as one of another round. A slot that holds another snapshot stays as it is."""
        if self.words().sealed != before:
            return
        self._store(SlotWord.STATE, SlotState.WRITING)
        self._store(SlotWord.PERSIST, persist)
        self._store(SlotWord.ROUND, after.round)
        self._store(SlotWord.SNAPSHOT, after.snapshot)
        self._store(SlotWord.STATE, SlotState.SEALED)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _store(self, word: SlotWord, value: int) -> None:
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
    """Return the slots for the copies of one rank. A slot of its plan keeps its contents; others are replaced.

    Raises: CheckpointError naming the file and the missing memory.
    """
    fillers = []
    for header in _headers(kept):
        path = arena.copy(kept.owner, header.slot)
        if not is_same_slot(path, header):
            make_slot(path, header)
        fillers.append(SlotFiller(path))
    return fillers


def missing_copy_bytes(arena: Arena, kept: PlannedSlot) -> int:
    """Return how many bytes must be reserved for copies that do not exist yet. Copies of another plan are removed.

    Raises: CheckpointError naming a slot that cannot be removed.
    """
    return missing_bytes((arena.copy(kept.owner, header.slot), header) for header in _headers(kept))


def slot_to_overwrite(words: Sequence[SlotWords]) -> int:
    """Return the index of a slot without a complete snapshot; if all have one, of the slot with the oldest."""
    return min(
        range(len(words)),
        key=lambda slot: (words[slot].sealed is not None, words[slot].snapshot),
    )


def removable_copies(
    files: Sequence[SlotFile], kept: Collection[int], needed: Collection[int]
) -> tuple[list[SlotFile], list[SlotFile]]:
    """Return the copies that may be removed now, and those that may be removed after they were fetched.

    kept: the owners whose copies this host keeps. needed: the owners whose snapshot is fetched from this host.
    """
    unkept = [file for file in files if file.is_copy and file.rank not in kept]
    return [file for file in unkept if file.rank not in needed], [file for file in unkept if file.rank in needed]


def remove_copies(files: Sequence[SlotFile]) -> None:
    """Remove copies. Raises: CheckpointError naming a file that cannot be removed."""
    for file in files:
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{file.path}: cannot be removed: {error.strerror}") from error


def _headers(kept: PlannedSlot) -> list[SlotHeader]:
    digest = bytes.fromhex(kept.plan_digest)
    return [SlotHeader(kept.owner, slot, NUM_COPY_SLOTS, kept.contents_bytes, digest) for slot in range(NUM_COPY_SLOTS)]
