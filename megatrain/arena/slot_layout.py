"""The bytes of a slot, version 1: a file of the arena that holds one snapshot of one rank.

A slot is a header page, then its contents: first the image of the rank's data file, then the state that only a restore
from memory needs (a RankPlan has the size of the image). All integers are little endian. The fixed part of the header
is written before the file gets its final name, and never again. The words, 64-bit fields of the header (SlotWord),
change while ranks run; they are aligned, so that one instruction loads or stores a word. A worker stores STATE=WRITING
first and STATE=SEALED last. So a reader that finds SEALED with the same SNAPSHOT before and after its read of the
contents has read one snapshot. slot_file.py reads slots.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from megatrain.contracts.errors import CheckpointError

MAGIC = b"MTARENA1"
HEADER_BYTES = 4096
"""One page, so that the contents after the header begin on a page and can be pinned."""
_FIXED = struct.Struct("<8s I I I I Q 32s")
_CRC = struct.Struct("<I")
PLAN_DIGEST_BYTES = 32
MAX_SLOTS = 2
NUM_WORDS = HEADER_BYTES // 8


class SlotWord(IntEnum):
    """Index of each changing 64-bit word of the header page (byte offset = 8 * index)."""

    STATE = 128
    STEP = 129
    SNAPSHOT = 130
    """The number of the snapshot, counted over the job, so a slot that was written again has another number."""
    ROUND = 131
    CONSUMED_SAMPLES = 132
    CONSUMED_TOKENS = 133
    NUM_UPDATES = 134
    NUM_SKIPPED = 135
    SEALED_UNIX_NS = 136
    PERSIST = 144
    """In a separate cache line: the writer process stores only this word, the worker stores all words."""


class SlotState(IntEnum):
    """The state of a slot's contents."""

    EMPTY = 0
    WRITING = 1
    """A worker is writing it, or died while it wrote."""
    SEALED = 2
    """The snapshot is complete on all ranks: they agreed on that before any rank stored SEALED."""


class Persist(IntEnum):
    """The state of a snapshot with respect to storage.

    A worker stores PENDING when it seals the slot, FAILED when the ranks give the snapshot up, and PENDING or DONE when
    a later round adopts the snapshot. The writer stores DONE or FAILED. Copies of other hosts' snapshots have NONE.
    """

    NONE = 0
    PENDING = 1
    """The snapshot waits to be written."""
    DONE = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The fixed part. `rank` is the snapshot's owner, also in a copy at a peer; `plan_digest` identifies the layout.

    `contents_bytes` is the size of everything after the header page.
    """

    rank: int
    slot: int
    num_slots: int
    contents_bytes: int
    plan_digest: bytes


@dataclass(frozen=True, slots=True, order=True)
class SealedSnapshot:
    """A snapshot that is complete on all ranks. Slots hold the same snapshot only if all three fields are equal."""

    step: int
    round: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class SlotWords:
    """The words at one moment. Fields other than `state` and `persist` are valid only while `state` is SEALED."""

    state: SlotState
    step: int
    snapshot: int
    round: int
    consumed_samples: int
    consumed_tokens: int
    num_updates: int
    num_skipped: int
    sealed_unix_ns: int
    persist: Persist

    @property
    def sealed(self) -> SealedSnapshot | None:
        """The snapshot in the slot, None when it is not complete."""
        return SealedSnapshot(self.step, self.round, self.snapshot) if self.state == SlotState.SEALED else None


def slot_bytes(contents_bytes: int) -> int:
    """Return the size of the file of a slot with these contents."""
    return HEADER_BYTES + contents_bytes


def encode_header(header: SlotHeader) -> bytes:
    """Return the first bytes of a header page. The rest of the page is zero in a new slot.

    Raises: CheckpointError when a field does not fit.
    """
    problem = _header_problem(header)
    if problem is not None:
        raise CheckpointError(f"arena slot: {problem}")
    fixed = _FIXED.pack(
        *(MAGIC, HEADER_BYTES, header.rank, header.slot, header.num_slots),
        *(header.contents_bytes, header.plan_digest),
    )
    return fixed + _CRC.pack(zlib.crc32(fixed))


def decode_header(page: bytes, location: str) -> SlotHeader:
    """Return the fixed part of a header page; `location` names the file in errors.

    Raises: CheckpointError for anything but an intact version 1 header.
    """
    if page[: len(MAGIC)] != MAGIC:
        raise CheckpointError(f"{location}: starts with {page[:8]!r}, expected {MAGIC!r}; this is not an arena slot")
    if len(page) < HEADER_BYTES:
        raise CheckpointError(
            f"{location}: {len(page)} bytes, and a slot has at least {HEADER_BYTES}; the file is truncated"
        )
    (found,) = _CRC.unpack_from(page, _FIXED.size)
    expected = zlib.crc32(page[: _FIXED.size])
    if found != expected:
        raise CheckpointError(f"{location}: header checksum {found:#010x}, expected {expected:#010x}; it is damaged")
    _, header_bytes, rank, slot, num_slots, contents_bytes, plan_digest = _FIXED.unpack_from(page)
    header = SlotHeader(rank, slot, num_slots, contents_bytes, plan_digest)
    problem = _header_problem(header)
    if header_bytes != HEADER_BYTES:
        problem = f"header_bytes={header_bytes}, version 1 has {HEADER_BYTES}"
    if problem is not None:
        raise CheckpointError(f"{location}: {problem}")
    return header


def _header_problem(header: SlotHeader) -> str | None:
    if not 0 <= header.slot < header.num_slots <= MAX_SLOTS:
        return f"slot={header.slot} of num_slots={header.num_slots}, expected 1 or {MAX_SLOTS} slots, counted from 0"
    if not 0 <= header.rank < 2**32:
        return f"rank={header.rank}, expected 0 to 2^32 - 1"
    if not 0 <= header.contents_bytes < 2**63:
        return f"contents_bytes={header.contents_bytes}, expected 0 to 2^63 - 1"
    if len(header.plan_digest) != PLAN_DIGEST_BYTES:
        return f"a plan digest of {len(header.plan_digest)} bytes, expected {PLAN_DIGEST_BYTES}"
    return None


def decode_words(page: bytes, location: str) -> SlotWords:
    """Return the words of a header page. Raises: CheckpointError for a state that does not exist."""
    words = struct.unpack_from(f"<{NUM_WORDS}Q", page)
    try:
        state, persist = SlotState(words[SlotWord.STATE]), Persist(words[SlotWord.PERSIST])
    except ValueError as error:
        raise CheckpointError(f"{location}: {error}; the slot is damaged") from error
    return SlotWords(
        state=state,
        step=words[SlotWord.STEP],
        snapshot=words[SlotWord.SNAPSHOT],
        round=words[SlotWord.ROUND],
        consumed_samples=words[SlotWord.CONSUMED_SAMPLES],
        consumed_tokens=words[SlotWord.CONSUMED_TOKENS],
        num_updates=words[SlotWord.NUM_UPDATES],
        num_skipped=words[SlotWord.NUM_SKIPPED],
        sealed_unix_ns=words[SlotWord.SEALED_UNIX_NS],
        persist=persist,
    )
