"""The files of a checkpoint: data files, which each host writes from its slots, and the coordinator's small files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from megatrain.arena.directory import Arena
from megatrain.arena.plans import RankPlan
from megatrain.arena.sealed import SealedSlot
from megatrain.arena.slot_file import SlotReader
from megatrain.arena.slot_layout import SealedSnapshot
from megatrain.checkpoint.image_stream import write_data_file
from megatrain.checkpoint_format.checkpoint_names import (
    INDEX_NAME,
    METADATA_NAME,
    SENTENCEPIECE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    is_sentencepiece,
    name_in_round,
)
from megatrain.checkpoint_format.data_file import data_file_name
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.contracts.errors import CheckpointError

_NUM_FILES_AT_ONCE = 4
"""Files in progress at once: while some wait for the disk, others are read and hashed."""


def write_slots(
    arena: Arena, directory: Location, snapshot: SealedSnapshot, slots: Sequence[SealedSlot]
) -> Mapping[str, FileEntry]:
    """Write the slots of a snapshot, several at once, and return the entries of the files, by name.

    Raises: CheckpointError.
    """

    def write(opened: tuple[RankPlan, SlotReader]) -> FileEntry:
        plan, slot = opened
        return write_data_file(directory / data_file_name(snapshot.round, plan.rank), slot, plan, snapshot)

    with ExitStack() as stack, ThreadPoolExecutor(_NUM_FILES_AT_ONCE, "file") as pool:
        # open all slots first: an open slot can be read to the end even if a new file gets its name
        opened = [_open(arena, slot, stack) for slot in slots]
        entries = list(pool.map(write, opened))
    return {data_file_name(snapshot.round, plan.rank): entry for (plan, _), entry in zip(opened, entries, strict=True)}


def _open(arena: Arena, sealed: SealedSlot, stack: ExitStack) -> tuple[RankPlan, SlotReader]:
    location = arena.rank_plan(sealed.rank)
    plan = RankPlan.read(location)
    slot = stack.enter_context(SlotReader(sealed.path))
    if (plan.rank, plan.plan_digest) != (slot.header.rank, slot.header.plan_digest):
        raise CheckpointError(
            f"{sealed.path}: its plan is not the one in {location}; it belongs to a layout that the job no longer uses"
        )
    return plan, slot


def small_files(arena: Arena, round_number: int, tokenizer: str) -> dict[str, bytes]:
    """Return the content of the metadata, of the index and of the tokenizer's files, by their names in the round.

    tokenizer: the path of the tokenizer's file, "" for none. Raises: CheckpointError naming a file.
    """
    paths = {METADATA_NAME: arena.metadata(round_number), INDEX_NAME: arena.index(round_number)}
    if tokenizer:
        path = Path(tokenizer)
        paths[SENTENCEPIECE_NAME if is_sentencepiece(path.name) else TOKENIZER_NAME] = path
        beside = path.with_name(TOKENIZER_CONFIG_NAME)  # names the token that ends documents
        if beside.exists():
            paths[TOKENIZER_CONFIG_NAME] = beside
    return {name_in_round(name, round_number): _read(path) for name, path in paths.items()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
