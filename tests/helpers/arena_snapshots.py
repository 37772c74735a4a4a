"""Arenas written by tests as the workers of a host leave them: plans, and sealed slots whose items are arbitrary
bytes."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatrain.arena.directory import Arena, create_arena
from megatrain.arena.locks import create_wake
from megatrain.arena.plans import HostPlan, ManifestTemplate, RankPlan
from megatrain.arena.slot_file import SlotReader
from megatrain.arena.slot_layout import HEADER_BYTES, Persist, SlotHeader, SlotState, SlotWord, encode_header
from megatrain.checkpoint_format.checkpoint_names import INDEX_NAME, METADATA_NAME, step_directory_name
from megatrain.checkpoint_format.data_file import data_file_name
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import CheckpointMesh, CheckpointVersions
from megatrain.contracts.layout import Layout
from tests.helpers.checkpoint_tree import put_main
from tests.helpers.one_source import stream_of_one

ROUND = 2
ROW_BYTES = 16
"""The bytes of a row of the only tensor in the test's metadata: each item of each rank holds one row."""
ITEM_LENGTHS = (1000, 64, 77)
_REST_BYTES = 192
"""The bytes of a slot's contents after the image: state that only a restore from memory needs."""


def host_plan(checkpoints: str, **changes: Any) -> HostPlan:
    plan = HostPlan(
        checkpoints=checkpoints, job="demo", branch="main", round=ROUND, host_index=0, num_hosts=1, ranks=(0, 1),
        is_coordinator=True, num_slots=2, keep_last=0, keep_every=0, keep_arena_s=0.0, commit_timeout_s=1000.0,
        manifest=ManifestTemplate(
            config={"model": {"hidden_size": 64}}, config_hash="abc123",
            mesh=CheckpointMesh(Layout(tp_size=1, pp_size=1, dp_size=2), num_chunks=1),
            versions=CheckpointVersions(megatrain="0.1.0", torch="2.13.0", python="3.11.7"), has_optimizer=True,
            data=stream_of_one(num_tokens=100_000, seed=1234),
        ),
        tokenizer="", claim="", began_at_step=0, is_exclusive=True,
    )  # fmt: skip
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
    """Return the bytes of a rank's image, different for each snapshot."""
    generator = random.Random(f"{rank}/{snapshot}")
    image = bytearray(image_bytes(lengths))
    for offset, length in item_ranges(lengths):
        image[offset : offset + length] = generator.randbytes(length)
    return bytes(image)


@cache
def described_by(
    ranks: tuple[int, ...], round_number: int, lengths: tuple[int, ...] = ITEM_LENGTHS
) -> dict[str, bytes]:
    """Return the `.metadata` and the index of a checkpoint that these ranks write."""
    from megatrain.checkpoint.gathered_items import stored_by_ranks  # Imported here because it loads torch.
    from megatrain.checkpoint.metadata_file import describing_files

    shape = [len(ranks) * len(lengths), ROW_BYTES]
    items: dict[int, list[list[Any]]] = {
        rank: [
            ["model.w", shape, [index * len(lengths) + number, 0], [1, ROW_BYTES], "uint8", offset, length]
            for number, (offset, length) in enumerate(item_ranges(lengths))
        ]
        for index, rank in enumerate(ranks)
    }
    return describing_files(stored_by_ranks(items, lambda rank: data_file_name(round_number, rank)))


def plan_digest(lengths: Sequence[int] = ITEM_LENGTHS) -> bytes:
    return hashlib.sha256(repr(tuple(lengths)).encode()).digest()


def put_description(arena: Arena, round_number: int, described: Mapping[str, bytes]) -> None:
    """Put the `.metadata` and the index of a round's checkpoints into the coordinator's arena."""
    arena.metadata(round_number).write_bytes(described[METADATA_NAME])
    arena.index(round_number).write_bytes(described[INDEX_NAME])


def make_arena(
    path: Path, plan: HostPlan, described: Mapping[str, bytes] | None = None, lengths: Sequence[int] = ITEM_LENGTHS
) -> Arena:
    """Create the arena of a host with everything that workers write into it except slots."""
    arena = create_arena(path)
    create_wake(arena.wake)
    for rank in plan.ranks:
        RankPlan(rank, image_bytes(lengths), plan_digest(lengths), tuple(item_ranges(lengths))).write(
            arena.rank_plan(rank)
        )
    if plan.is_coordinator:
        put_description(arena, plan.round, described or {METADATA_NAME: b"", INDEX_NAME: b""})
    plan.write(arena.host_plan)
    return arena


@dataclass(frozen=True)
class SnapshotJob:
    """A job on several hosts that share one storage, with nothing saved yet."""

    checkpoints: Location
    arenas: tuple[Arena, ...]

    @property
    def arena(self) -> Arena:
        """The coordinator's arena."""
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
        """Return the persist states of the snapshots in all slots, by step."""
        found: dict[int, set[Persist]] = {}
        for arena in self.arenas:
            for file in arena.slots():
                with SlotReader(file.path) as reader:
                    words = reader.words()
                found.setdefault(words.step, set()).add(words.persist)
        return found


def make_job(directory: Path, num_hosts: int = 1, **changes: Any) -> SnapshotJob:
    """Create a run whose hosts have two ranks each; the first host is the coordinator. `changes` apply to the plans."""
    checkpoints = LocalLocation(directory / "checkpoints")
    put_main(checkpoints)
    described = described_by(tuple(range(2 * num_hosts)), ROUND)
    arenas = []
    for index in range(num_hosts):
        plan = host_plan(
            str(checkpoints), host_index=index, num_hosts=num_hosts, ranks=(2 * index, 2 * index + 1),
            is_coordinator=index == 0, **changes,
        )  # fmt: skip
        arenas.append(make_arena(directory / f"arena-{index}", plan, described))
    return SnapshotJob(checkpoints, tuple(arenas))


def put_slot(
    arena: Arena,
    rank: int,
    *,
    step: int,
    snapshot: int,
    round_number: int = ROUND,
    state: SlotState = SlotState.SEALED,
    persist: Persist = Persist.PENDING,
    lengths: Sequence[int] = ITEM_LENGTHS,
    image: bytes | None = None,
) -> Path:
    """Write a snapshot to its slot, replacing the content, and return the slot's file."""
    slot = snapshot % 2
    content = make_image(rank, snapshot, lengths) if image is None else image
    page = bytearray(HEADER_BYTES)
    header = encode_header(SlotHeader(rank, slot, 2, len(content) + _REST_BYTES, plan_digest(lengths)))
    page[: len(header)] = header
    values = {
        SlotWord.STATE: state, SlotWord.STEP: step, SlotWord.SNAPSHOT: snapshot, SlotWord.ROUND: round_number,
        SlotWord.CONSUMED_SAMPLES: 32 * step, SlotWord.CONSUMED_TOKENS: 8192 * step, SlotWord.NUM_UPDATES: step - 1,
        SlotWord.NUM_SKIPPED: 1, SlotWord.SEALED_UNIX_NS: 1_790_000_000_000_000_000, SlotWord.PERSIST: persist,
    }  # fmt: skip
    for word, value in values.items():
        struct.pack_into("<Q", page, 8 * word, value)
    path = arena.slot(rank, slot)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(bytes(page) + content + bytes(_REST_BYTES))
    temporary.replace(path)
    return path


def read_contents(slot: SlotReader, offset: int, num_bytes: int) -> bytes:
    """Return a part of the contents of a slot."""
    content = bytearray(num_bytes)
    slot.read_contents_into(offset, content)
    return bytes(content)
