"""Arenas made by hand, as the workers of a host leave them: plans, and sealed slots whose items are arbitrary bytes."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatrain.checkpoint.data_file import data_file_name
from megatrain.contracts.arena import Arena, create_arena
from megatrain.contracts.arena_layout import (
    HEADER_BYTES,
    Persist,
    SlotHeader,
    SlotState,
    Word,
    encode_header,
)
from megatrain.contracts.arena_locks import create_wake
from megatrain.contracts.arena_plans import HostPlan, ManifestTemplate, RankPlan
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.checkpoint_files import step_directory_name
from megatrain.contracts.layout import Layout
from megatrain.contracts.location import LocalLocation, Location
from megatrain.contracts.manifest import CheckpointMesh, CheckpointVersions, SampleStream
from tests.helpers.checkpoint_tree import put_main

ROUND = 2
ROW_BYTES = 16
"""Of the one tensor in hand-made metadata: each item of each rank holds one row of it."""
ITEM_LENGTHS = (1000, 64, 77)
_REST_BYTES = 192
"""Of a slot's image behind what goes into the file: state that only copies need."""


def host_plan(checkpoints: str, **changes: Any) -> HostPlan:
    plan = HostPlan(
        checkpoints=checkpoints,
        job="demo",
        branch="main",
        round=ROUND,
        host_index=0,
        num_hosts=1,
        ranks=(0, 1),
        is_coordinator=True,
        num_slots=2,
        keep_last=0,
        keep_every=0,
        keep_arena_s=0.0,
        commit_timeout_s=1000.0,
        manifest=ManifestTemplate(
            config={"model": {"hidden_size": 64}},
            config_hash="abc123",
            mesh=CheckpointMesh(Layout(tp_size=1, pp_size=1, dp_size=2), num_chunks=1),
            versions=CheckpointVersions(megatrain="0.1.0", torch="2.13.0", python="3.11.7"),
            has_optimizer=True,
            data=SampleStream(num_tokens=100_000, seed=1234),
        ),
        tokenizer="",
        claim="",
        began_at_step=0,
        is_exclusive=True,
    )
    return replace(plan, **changes)


def item_ranges(lengths: Sequence[int] = ITEM_LENGTHS) -> list[tuple[int, int]]:
    ranges, end = [], 0
    for length in lengths:
        ranges.append((end, length))
        end += -(-length // 64) * 64
    return ranges


def image_bytes(lengths: Sequence[int] = ITEM_LENGTHS) -> int:
    return sum(-(-length // 64) * 64 for length in lengths)


def make_image(rank: int, snapshot: int, lengths: Sequence[int] = ITEM_LENGTHS) -> bytes:
    """Return the bytes of a rank's image, other ones for each snapshot."""
    generator = random.Random(f"{rank}/{snapshot}")
    image = bytearray(image_bytes(lengths))
    for offset, length in item_ranges(lengths):
        image[offset : offset + length] = generator.randbytes(length)
    return bytes(image)


@cache
def metadata_of(ranks: tuple[int, ...], round_number: int, lengths: tuple[int, ...] = ITEM_LENGTHS) -> bytes:
    """Return the `.metadata` of a checkpoint that these ranks write."""
    from megatrain.checkpoint.metadata_file import metadata_bytes  # here: it loads torch

    shape = [len(ranks) * len(lengths), ROW_BYTES]
    items: dict[int, list[list[Any]]] = {
        rank: [
            ["model.w", shape, [index * len(lengths) + number, 0], [1, ROW_BYTES], "uint8", offset, length]
            for number, (offset, length) in enumerate(item_ranges(lengths))
        ]
        for index, rank in enumerate(ranks)
    }
    return metadata_bytes(items, lambda rank: data_file_name(round_number, rank))


def plan_digest(lengths: Sequence[int] = ITEM_LENGTHS) -> bytes:
    return hashlib.sha256(repr(tuple(lengths)).encode()).digest()


def make_arena(path: Path, plan: HostPlan, metadata: bytes = b"", lengths: Sequence[int] = ITEM_LENGTHS) -> Arena:
    """Make the arena of a host with all that workers write into it but slots."""
    arena = create_arena(path)
    create_wake(arena.wake)
    for rank in plan.ranks:
        RankPlan(rank, image_bytes(lengths), plan_digest(lengths), tuple(item_ranges(lengths))).write(
            arena.rank_plan(rank)
        )
    if plan.is_coordinator:
        arena.metadata(plan.round).write_bytes(metadata)
    plan.write(arena.host_plan)
    return arena


@dataclass(frozen=True)
class Job:
    """A job on some hosts that share one storage, with nothing saved yet."""

    checkpoints: Location
    arenas: tuple[Arena, ...]

    @property
    def arena(self) -> Arena:
        """The coordinator's."""
        return self.arenas[0]

    def step(self, step: int) -> Location:
        return self.checkpoints / "main" / step_directory_name(step)

    def change_plans(self, **changes: Any) -> None:
        for arena in self.arenas:
            replace(HostPlan.read(arena.host_plan), **changes).write(arena.host_plan)

    def put_snapshot(self, step: int, snapshot: int, **changes: Any) -> None:
        """Put a snapshot into the slots of all ranks of all hosts."""
        for arena in self.arenas:
            for rank in HostPlan.read(arena.host_plan).ranks:
                put_slot(arena, rank, step=step, snapshot=snapshot, **changes)

    def persist_words(self) -> dict[int, set[Persist]]:
        """Return what became of the snapshots in all slots, by step."""
        found: dict[int, set[Persist]] = {}
        for arena in self.arenas:
            for file in arena.slots():
                with SlotReader(file.path) as reader:
                    words = reader.words()
                found.setdefault(words.step, set()).add(words.persist)
        return found


def make_job(directory: Path, num_hosts: int = 1, **changes: Any) -> Job:
    """Make a run whose hosts have two ranks each; the first one is the coordinator. `changes` are of the plans."""
    checkpoints = LocalLocation(directory / "checkpoints")
    put_main(checkpoints)
    metadata = metadata_of(tuple(range(2 * num_hosts)), ROUND)
    arenas = []
    for index in range(num_hosts):
        plan = host_plan(
            str(checkpoints),
            host_index=index,
            num_hosts=num_hosts,
            ranks=(2 * index, 2 * index + 1),
            is_coordinator=index == 0,
            **changes,
        )
        arenas.append(make_arena(directory / f"arena-{index}", plan, metadata))
    return Job(checkpoints, tuple(arenas))


def put_slot(
    arena: Arena,
    rank: int,
    *,
    step: int,
    snapshot: int,
    round_number: int = ROUND,
    state: SlotState = SlotState.SEALED,
    persist: Persist = Persist.WANTED,
    lengths: Sequence[int] = ITEM_LENGTHS,
    image: bytes | None = None,
) -> Path:
    """Put a snapshot into its slot, in place of what is there, and return the slot's file."""
    slot = snapshot % 2
    content = make_image(rank, snapshot, lengths) if image is None else image
    page = bytearray(HEADER_BYTES)
    header = encode_header(SlotHeader(rank, slot, 2, len(content) + _REST_BYTES, plan_digest(lengths)))
    page[: len(header)] = header
    values = {
        Word.STATE: state, Word.STEP: step, Word.SNAPSHOT: snapshot, Word.ROUND: round_number,
        Word.CONSUMED_SAMPLES: 32 * step, Word.CONSUMED_TOKENS: 8192 * step, Word.NUM_UPDATES: step - 1,
        Word.NUM_SKIPPED: 1, Word.SEALED_UNIX_NS: 1_790_000_000_000_000_000, Word.PERSIST: persist,
    }  # fmt: skip
    for word, value in values.items():
        struct.pack_into("<Q", page, 8 * word, value)
    path = arena.slot(rank, slot)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(bytes(page) + content + bytes(_REST_BYTES))
    temporary.replace(path)
    return path
