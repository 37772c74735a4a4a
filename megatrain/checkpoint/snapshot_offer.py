"""The messages about a sealed snapshot between two ranks, and the transfer of its bytes.

An offer has all fields of the slot's header that describe the snapshot, so that the copy can replace the original.
Sizes are compared with the plan before anything is written. The bytes are sent block by block, and are valid only if
the tag after them matches.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self

from megatrain.arena.slot_file import SlotReader
from megatrain.arena.slot_layout import SealedSnapshot
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.files.json_object import JsonObject
from megatrain.peers.link import PeerConnection

_SCHEMA_VERSION = 1
_DAMAGE = "the peer runs another version of this program"
_BLOCK_BYTES = 4 * 2**20
_SHOWN_DIGITS = 16


class SlotReusedError(CheckpointError):
    """The worker has begun another snapshot in a slot that was being read."""


@dataclass(frozen=True, slots=True)
class PlannedSlot:
    """A slot's owner, size and plan. Both peers must agree on these before any byte is sent."""

    owner: int
    contents_bytes: int
    plan_digest: str

    def __str__(self) -> str:
        return f"rank {self.owner} (slots of {self.contents_bytes:,} bytes, plan {self.plan_digest[:_SHOWN_DIGITS]})"


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A snapshot that a rank lacks, for the rank's plan."""

    planned: PlannedSlot
    sealed: SealedSnapshot

    def encode(self) -> bytes:
        return json.dumps({"schema_version": _SCHEMA_VERSION, **asdict(self.planned), **asdict(self.sealed)}).encode()

    @classmethod
    def decode(cls, message: bytes, location: str) -> Self:
        """Raises: CheckpointError naming the location and the field."""
        reader = JsonObject.parse(message, location, _SCHEMA_VERSION, _DAMAGE)
        return cls(PlannedSlot(**reader.scalars(PlannedSlot)), SealedSnapshot(**reader.scalars(SealedSnapshot)))


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A sealed snapshot as its slot describes it."""

    owner: int
    contents_bytes: int
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
        """Return the offer of a slot's snapshot, None when the slot holds no complete one."""
        header, words = slot.header, slot.words()
        if words.sealed is None:
            return None
        return cls(
            owner=header.rank,
            contents_bytes=header.contents_bytes,
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
        return PlannedSlot(self.owner, self.contents_bytes, self.plan_digest)

    @property
    def sealed(self) -> SealedSnapshot:
        return SealedSnapshot(self.step, self.round, self.snapshot)

    def encode(self) -> bytes:
        return json.dumps({"schema_version": _SCHEMA_VERSION, **asdict(self)}).encode()

    @classmethod
    def decode(cls, message: bytes, location: str) -> Self:
        """Raises: CheckpointError naming the location and the field."""
        reader = JsonObject.parse(message, location, _SCHEMA_VERSION, _DAMAGE)
        reader.check_names(cls, "schema_version")
        return cls(**reader.scalars(cls))


def send_contents(connection: PeerConnection, slot: SlotReader, snapshot: SealedSnapshot) -> None:
    """Send a slot's contents. The tag is sent only if the slot still holds the snapshot.

    Raises: SlotReusedError; CommunicationError; CheckpointError when the slot cannot be read.
    """
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, slot.header.contents_bytes)))
    for offset in range(0, slot.header.contents_bytes, _BLOCK_BYTES):
        block = buffer[: slot.header.contents_bytes - offset]
        slot.read_contents_into(offset, block)
        # a worker sets WRITING before it changes the contents, so bytes that were read before belong to the snapshot
        if slot.words().sealed != snapshot:
            raise SlotReusedError(
                f"{slot.path}: its next snapshot began before the one of step {snapshot.step} was sent"
            )
        connection.send(block)
    connection.send_tag()


def receive_contents(connection: PeerConnection, num_bytes: int, write: Callable[[int, memoryview], None]) -> None:
    """Receive a slot's contents, whose size is known. Passes each offset and block to `write`, and checks the tag.

    Raises: CommunicationError, and what `write` raises.
    """
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, num_bytes)))
    for offset in range(0, num_bytes, _BLOCK_BYTES):
        block = buffer[: num_bytes - offset]
        connection.receive_into(block)
        write(offset, block)
    connection.check_tag()
