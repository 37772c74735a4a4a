"""What one rank tells another of a sealed snapshot before it sends it, and the way of the bytes.

An offer has all that the slot's header and words say, so that the copy can stand in for it. Sizes are compared with the
plan before anything is written; the bytes go block by block, and count only when the tag after them fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self

from megatrain.comm.peer_link import PeerConnection
from megatrain.contracts.arena import SealedSnapshot
from megatrain.contracts.arena_layout import SlotState, SlotWords
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.json_object import JsonObject

_SCHEMA_VERSION = 1
_DAMAGE = "the peer is of another version of this program"
_BLOCK_BYTES = 4 * 2**20


class SlotReusedError(CheckpointError):
    """The worker has begun another snapshot in a slot that was being read."""


@dataclass(frozen=True, slots=True)
class PlannedSlot:
    """Whose slot, how large, and of which plan: what a peer must agree on before a byte moves."""

    owner: int
    image_bytes: int
    plan_digest: str


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A snapshot that a rank lacks, of the plan that it has."""

    planned: PlannedSlot
    sealed: SealedSnapshot

    def encode(self) -> bytes:
        return json.dumps({"schema_version": _SCHEMA_VERSION, **asdict(self.planned), **asdict(self.sealed)}).encode()

    @classmethod
    def decode(cls, message: bytes, place: str) -> Self:
        """Raises: CheckpointError naming the place and the field."""
        reader = JsonObject.parse(message, place, _SCHEMA_VERSION, _DAMAGE)
        return cls(
            PlannedSlot(reader.count("owner"), reader.count("image_bytes"), reader.text("plan_digest")),
            SealedSnapshot(reader.count("step"), reader.count("round"), reader.count("snapshot")),
        )


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A sealed snapshot as its slot describes it."""

    owner: int
    image_bytes: int
    plan_digest: str
    step: int
    snapshot: int
    round: int
    consumed_samples: int
    consumed_tokens: int
    num_updates: int
    num_skipped: int
    sealed_unix_ns: int

    @classmethod
    def of_slot(cls, slot: SlotReader) -> Self | None:
        """Return what a slot holds, None when nothing whole is in it."""
        header, words = slot.header, slot.words()
        if words.state != SlotState.SEALED:
            return None
        return cls(
            owner=header.rank,
            image_bytes=header.image_bytes,
            plan_digest=header.plan_digest.hex(),
            step=words.step,
            snapshot=words.snapshot,
            round=words.round,
            consumed_samples=words.consumed_samples,
            consumed_tokens=words.consumed_tokens,
            num_updates=words.num_updates,
            num_skipped=words.num_skipped,
            sealed_unix_ns=words.sealed_unix_ns,
        )

    @property
    def planned(self) -> PlannedSlot:
        return PlannedSlot(self.owner, self.image_bytes, self.plan_digest)

    @property
    def sealed(self) -> SealedSnapshot:
        return SealedSnapshot(self.step, self.round, self.snapshot)

    def encode(self) -> bytes:
        return json.dumps({"schema_version": _SCHEMA_VERSION, **asdict(self)}).encode()

    @classmethod
    def decode(cls, message: bytes, place: str) -> Self:
        """Raises: CheckpointError naming the place and the field."""
        reader = JsonObject.parse(message, place, _SCHEMA_VERSION, _DAMAGE)
        reader.check_names(cls, "schema_version")
        return cls(
            owner=reader.count("owner"),
            image_bytes=reader.count("image_bytes"),
            plan_digest=reader.text("plan_digest"),
            step=reader.count("step"),
            snapshot=reader.count("snapshot"),
            round=reader.count("round"),
            consumed_samples=reader.count("consumed_samples"),
            consumed_tokens=reader.count("consumed_tokens"),
            num_updates=reader.count("num_updates"),
            num_skipped=reader.count("num_skipped"),
            sealed_unix_ns=reader.count("sealed_unix_ns"),
        )


def holds(words: SlotWords, snapshot: SealedSnapshot) -> bool:
    """Whether a slot with these words has this snapshot, whole."""
    found = SealedSnapshot(words.step, words.round, words.snapshot)
    return words.state == SlotState.SEALED and found == snapshot


def send_image(connection: PeerConnection, slot: SlotReader, snapshot: SealedSnapshot) -> None:
    """Send a slot's image. The tag goes out only while the slot still holds the snapshot.

    Raises: SlotReusedError; CommunicationError; CheckpointError when the slot cannot be read.
    """
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, slot.header.image_bytes)))
    for offset in range(0, slot.header.image_bytes, _BLOCK_BYTES):
        block = buffer[: slot.header.image_bytes - offset]
        slot.read_image_into(offset, block)
        # a worker says WRITING before it changes the image, so what was read before is of the snapshot
        if not holds(slot.words(), snapshot):
            raise SlotReusedError(
                f"{slot.path}: its next snapshot began before the one of step {snapshot.step} was sent"
            )
        connection.send(block)
    connection.send_tag()


def receive_image(connection: PeerConnection, num_bytes: int, write: Callable[[int, memoryview], None]) -> None:
    """Take an image of a known size, giving each block and its offset to `write`; return when the tag fits.

    Raises: CommunicationError, and what `write` raises.
    """
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, num_bytes)))
    for offset in range(0, num_bytes, _BLOCK_BYTES):
        block = buffer[: num_bytes - offset]
        connection.receive_into(block)
        write(offset, block)
    connection.check_tag()
