"""Finds the sealed snapshots of an arena. A snapshot that is not sealed is incomplete and never used."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.arena.directory import Arena, SlotFile
from megatrain.arena.slot_file import SlotReader
from megatrain.arena.slot_layout import SealedSnapshot, SlotHeader, SlotWords
from megatrain.contracts.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class SealedSlot:
    """A slot with a complete snapshot: its file name, the fixed part of its header, and the words that change."""

    file: SlotFile
    header: SlotHeader
    words: SlotWords
    snapshot: SealedSnapshot

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def rank(self) -> int:
        return self.file.rank


def sealed_slots(arena: Arena, *, is_copy: bool = False) -> list[SealedSlot]:
    """Return the slots with a complete snapshot of this host's ranks, or with `is_copy` the copies for other hosts.

    A slot that is damaged, being written or just removed is left out.
    Raises: CheckpointError when the directory cannot be listed.
    """
    found = []
    for file in arena.slots():
        if file.is_copy != is_copy:
            continue
        with suppress(CheckpointError), SlotReader(file.path) as reader:
            header, words = reader.header, reader.words()
            if (header.rank, header.slot) == (file.rank, file.slot) and words.sealed is not None:
                found.append(SealedSlot(file, header, words, words.sealed))
    return found


def sealed_by_rank(arena: Arena, *, is_copy: bool = False) -> dict[int, list[SealedSnapshot]]:
    """Return the sealed snapshots of this host's ranks, or with `is_copy` those of other hosts, by rank, oldest first.

    Raises: CheckpointError when the directory cannot be listed.
    """
    found: dict[int, list[SealedSnapshot]] = {}
    for slot in sealed_slots(arena, is_copy=is_copy):
        found[slot.rank] = sorted([*found.get(slot.rank, []), slot.snapshot])
    return found
