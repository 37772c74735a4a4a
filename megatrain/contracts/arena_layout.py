"""The bytes of a slot, version 1: a file of the arena that holds one snapshot of one rank.

A slot is a header page, then an image: what goes into the rank's data file, and after it what only a restore from
memory needs (a RankPlan says where the first part ends). All integers are little endian. The fixed part of the
header is written before the file gets its name and never again. The words change while ranks run; each is aligned, so
that one store or load is one machine word. A worker stores STATE=WRITING first and STATE=SEALED last, so that whoever
finds SEALED with the same SNAPSHOT before and after has read one snapshot. Reading: arena_slot.py.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from megatrain.contracts.errors import CheckpointError

MAGIC = b"MTARENA1"
HEADER_BYTES = 4096
"""One page, so that the image after it can be mapped and pinned on its own."""
_FIXED = struct.Struct("<8s I I I I Q 32s")
_CRC = struct.Struct("<I")
PLAN_DIGEST_BYTES = 32
MAX_SLOTS = 2
NUM_WORDS = HEADER_BYTES // 8


class Word(IntEnum):
    """Index of each 64-bit word of the header page that changes (byte offset = 8 * index)."""

    STATE = 128
    STEP = 129
    SNAPSHOT = 130
    """Counts up over the snapshots of the job: a slot that was written again shows another number."""
    ROUND = 131
    CONSUMED_SAMPLES = 132
    CONSUMED_TOKENS = 133
    NUM_UPDATES = 134
    NUM_SKIPPED = 135
    SEALED_UNIX_NS = 136
    PERSIST = 144
    """In a cache line of its own: the writer process stores here, the worker everywhere else."""


class SlotState(IntEnum):
    """What is in a slot."""

    EMPTY = 0
    WRITING = 1
    """Or left behind by a worker that died while it wrote."""
    SEALED = 2
    """Whole, and so are the snapshots of the same number of all ranks: they agreed before any was sealed."""


class Persist(IntEnum):
    """What becomes of a snapshot in storage. A worker says WANTED, the writer DONE or FAILED."""

    NONE = 0
    WANTED = 1
    DONE = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The fixed part. `rank` is whose snapshot it is, also in a copy at a peer; `plan_digest` tells the layout.

    `image_bytes` is all that follows the header page.
    """

    rank: int
    slot: int
    num_slots: int
    image_bytes: int
    plan_digest: bytes


@dataclass(frozen=True, slots=True)
class SlotWords:
    """The words at one moment. All but `state` and `persist` count only while `state` is SEALED."""

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


def slot_bytes(image_bytes: int) -> int:
    """Return the size of a slot file for an image."""
    return HEADER_BYTES + image_bytes


def encode_header(header: SlotHeader) -> bytes:
    """Return the first bytes of a header page; the rest of the page is zero in a new slot.

    Raises: CheckpointError when a field does not fit.
    """
    problem = _header_problem(header)
    if problem is not None:
        raise CheckpointError(f"arena slot: {problem}")
    fixed = _FIXED.pack(
        *(MAGIC, HEADER_BYTES, header.rank, header.slot, header.num_slots),
        *(header.image_bytes, header.plan_digest),
    )
    return fixed + _CRC.pack(zlib.crc32(fixed))


def decode_header(page: bytes, place: str) -> SlotHeader:
    """Return the fixed part of a header page; `place` names the file in errors.

    Raises: CheckpointError for anything but an intact version 1 header.
    """
    if page[: len(MAGIC)] != MAGIC:
        raise CheckpointError(f"{place}: starts with {page[:8]!r}, expected {MAGIC!r}; this is no slot of an arena")
    if len(page) < HEADER_BYTES:
        raise CheckpointError(f"{place}: {len(page)} bytes, a slot has at least {HEADER_BYTES}; the file is truncated")
    (found,) = _CRC.unpack_from(page, _FIXED.size)
    expected = zlib.crc32(page[: _FIXED.size])
    if found != expected:
        raise CheckpointError(f"{place}: header checksum {found:#010x}, expected {expected:#010x}; it is damaged")
    _, header_bytes, rank, slot, num_slots, image_bytes, plan_digest = _FIXED.unpack_from(page)
    header = SlotHeader(rank, slot, num_slots, image_bytes, plan_digest)
    problem = _header_problem(header)
    if header_bytes != HEADER_BYTES:
        problem = f"header_bytes={header_bytes}, version 1 has {HEADER_BYTES}"
    if problem is not None:
        raise CheckpointError(f"{place}: {problem}")
    return header


def _header_problem(header: SlotHeader) -> str | None:
    if not 0 <= header.slot < header.num_slots <= MAX_SLOTS:
        return f"slot={header.slot} of num_slots={header.num_slots}, expected 1 or {MAX_SLOTS} slots, counted from 0"
    if not 0 <= header.rank < 2**32:
        return f"rank={header.rank}, expected 0 to 2^32 - 1"
    if not 0 <= header.image_bytes < 2**63:
        return f"image_bytes={header.image_bytes}, expected 0 to 2^63 - 1"
    if len(header.plan_digest) != PLAN_DIGEST_BYTES:
        return f"a plan digest of {len(header.plan_digest)} bytes, expected {PLAN_DIGEST_BYTES}"
    return None


def decode_words(page: bytes, place: str) -> SlotWords:
    """Return the words of a header page. Raises: CheckpointError for a state that does not exist."""
    words = struct.unpack_from(f"<{NUM_WORDS}Q", page)
    try:
        state, persist = SlotState(words[Word.STATE]), Persist(words[Word.PERSIST])
    except ValueError as error:
        raise CheckpointError(f"{place}: {error}; the slot is damaged") from error
    return SlotWords(
        state=state,
        step=words[Word.STEP],
        snapshot=words[Word.SNAPSHOT],
        round=words[Word.ROUND],
        consumed_samples=words[Word.CONSUMED_SAMPLES],
        consumed_tokens=words[Word.CONSUMED_TOKENS],
        num_updates=words[Word.NUM_UPDATES],
        num_skipped=words[Word.NUM_SKIPPED],
        sealed_unix_ns=words[Word.SEALED_UNIX_NS],
        persist=persist,
    )
