"""The bytes of a black box, version 2: the offset of each field, and pure functions from values to bytes and back.

A black box is one file per rank: a header page, a control page, a page of process groups, then a ring of 64-byte
records. All integers are little endian and aligned to their size, so that one store or load is one machine word. Bytes
not named here are zero. A later writer of version 2 may use them, with zero for "no value".
docs/reference/black-box.md describes the format, and a test compares the two. header_encoding.py has the fields that
identify the rank in the header page; reader.py reads files.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum

from megatrain.contracts.black_box.values import (
    ControlPage,
    GroupRecord,
    Phase,
    Progress,
    Record,
    RecordedValue,
    RecordFlag,
    StepTotal,
)
from megatrain.contracts.errors import DataError

MAGIC = b"MTBLKBOX"
VERSION = 2
PAGE_BYTES = 4096
HEADER_OFFSET = 0
CONTROL_OFFSET = PAGE_BYTES
GROUPS_OFFSET = 2 * PAGE_BYTES
RING_OFFSET = 3 * PAGE_BYTES
RECORD_BYTES = 64
GROUP_BYTES = 64
MAX_RECORDS = 2**24
"""A ring of 1 GiB. A file that states more records is not a black box."""
MAX_GROUPS = 64
"""Entries in the group page. Entry 0 is never used: group 0 in a record means "no group"."""
MAX_STEP = 2**31 - 1
"""The largest step that a record's field can hold. A larger value in the header is not a step."""
NO_VALUE = 2**64 - 1
"""Stands for "no value" in a word (such as the step before the first one), and in the duration of an open record."""
_LOW_32_BITS = 2**32 - 1


class Word(IntEnum):
    """Index of each 64-bit word of the header page that changes while the rank runs (byte offset = 8 * index)."""

    CURSOR = 128
    """Sequence number of the last record that has begun."""
    STATE = 129
    ENDED_NS = 130
    NUM_LOST_ENDS = 131
    COMPLETED_COMMAND = 132
    PHASE = 136
    PHASE_SINCE_NS = 137
    CURRENT_STEP = 138
    STEP_STARTED_NS = 139
    COMPLETED_STEP = 140
    COMPLETED_NS = 141
    LAST_STEP_NS = 142
    MEDIAN_STEP_NS = 143
    AWAITED = 144
    """The last collective that the host began to wait for: sequence number * MAX_GROUPS + group number; 0: none."""
    LONGEST_CHECKPOINT_NS = 145
    LONGEST_EVALUATION_NS = 146
    LONGEST_WRITE_NS = 147
    SAVE_INTERVAL_NS = 148
    DEVICE_SEEN_NS = 149


NUM_HEADER_WORDS = PAGE_BYTES // 8

CONTROL = struct.Struct("<Q Q I I Q Q Q Q Q Q I")
"""Seqlock word (odd during a write), the fields of ControlPage, CRC-32 of the fields."""
_OF_CONTROL_PAGE = (
    *("command_number", "command", "sample_period", "interval_ns", "span_mask", "lease_ok_until_ns"),
    *("round", "written_ns", "stop_ns"),
)
CONTROL_FIELDS = ("seqlock", *_OF_CONTROL_PAGE, "crc32")

GROUP = struct.Struct("<I I i I Q Q 32s")
GROUP_FIELDS = ("number", "first_rank", "stride", "num_ranks", "entered", "left", "name")
GROUP_ENTERED_WORD = 2
GROUP_LEFT_WORD = 3

RECORD = struct.Struct("<Q Q Q Q Q i I i h H H H I")
RECORD_FIELDS = (
    *("sequence", "start_ns", "duration_ns", "launch_ns", "num_bytes", "step", "collective_sequence", "microbatch"),
    *("chunk", "operation", "group", "flags", "check"),
)
RECORD_BODY = struct.Struct("<Q Q Q Q i I i h H H H I")
"""A record without its sequence number, which the writer stores last."""
RECORD_WORDS = RECORD_BYTES // 8
_FLOAT = struct.Struct("<d")
_FLOAT_BITS = struct.Struct("<Q")


def box_bytes(capacity: int) -> int:
    """Return the size of a black box file for `capacity` records."""
    return RING_OFFSET + capacity * RECORD_BYTES


def header_words(page: bytes) -> tuple[int, ...]:
    """Return all words of a header page. `Word` has the indices."""
    return struct.unpack_from(f"<{NUM_HEADER_WORDS}Q", page)


def decode_progress(words: Sequence[int], location: str) -> Progress:
    """Decode the progress words. Raises: DataError for an impossible phase or step."""

    def known(word: Word) -> int | None:
        return None if words[word] == NO_VALUE else words[word]

    try:
        phase = Phase(words[Word.PHASE])
    except ValueError as error:
        raise DataError(f"{location}: phase {words[Word.PHASE]}, expected 0 to {max(Phase)}") from error
    for word in (Word.CURRENT_STEP, Word.COMPLETED_STEP):
        if MAX_STEP < words[word] < NO_VALUE:
            raise DataError(f"{location}: {word.name}={words[word]}, expected 0 to {MAX_STEP}")
    return Progress(
        phase=phase,
        phase_since_ns=words[Word.PHASE_SINCE_NS],
        current_step=known(Word.CURRENT_STEP),
        step_started_ns=known(Word.STEP_STARTED_NS),
        completed_step=known(Word.COMPLETED_STEP),
        completed_ns=known(Word.COMPLETED_NS),
        last_step_ns=known(Word.LAST_STEP_NS),
        median_step_ns=known(Word.MEDIAN_STEP_NS),
        completed_command=words[Word.COMPLETED_COMMAND],
        num_lost_ends=words[Word.NUM_LOST_ENDS],
        awaited_group=words[Word.AWAITED] % MAX_GROUPS,
        awaited_place=words[Word.AWAITED] // MAX_GROUPS,
        longest_checkpoint_ns=words[Word.LONGEST_CHECKPOINT_NS] or None,
        longest_evaluation_ns=words[Word.LONGEST_EVALUATION_NS] or None,
        longest_write_ns=words[Word.LONGEST_WRITE_NS] or None,
        save_interval_ns=words[Word.SAVE_INTERVAL_NS] or None,
        device_seen_ns=words[Word.DEVICE_SEEN_NS] or None,
    )


def encode_control(page: ControlPage, seqlock: int) -> bytes:
    """Return the control page's bytes.

    Raises: DataError when a value does not fit its field.
    """
    try:
        body = CONTROL.pack(seqlock, *(getattr(page, name) for name in _OF_CONTROL_PAGE), 0)
    except struct.error as error:
        raise DataError(f"control page: a field does not fit ({error}): {page}") from error
    return body[:-4] + struct.pack("<I", zlib.crc32(body[8:-4]))


def decode_control(raw: bytes) -> ControlPage | None:
    """Return the control page, or None when it is incomplete (odd seqlock word, or a wrong checksum)."""
    seqlock, *values, crc = CONTROL.unpack_from(raw)
    if seqlock % 2 or crc != zlib.crc32(raw[8 : CONTROL.size - 4]):
        return None
    return ControlPage(**dict(zip(_OF_CONTROL_PAGE, values, strict=True)))


def encode_group(group: GroupRecord) -> bytes:
    """Return a group's entry. Raises: DataError when the name is longer than its field."""
    raw = group.name.encode()
    if len(raw) > 32:
        raise DataError(f"black box: group name {group.name!r} has {len(raw)} bytes, the field holds 32; shorten it")
    return GROUP.pack(group.number, group.first_rank, group.stride, group.num_ranks, group.entered, group.left, raw)


def decode_groups(page: bytes) -> dict[int, GroupRecord]:
    """Return number -> group for every entry in use. An entry is in use if its number equals its index."""
    groups: dict[int, GroupRecord] = {}
    for index, (number, *values, raw) in enumerate(GROUP.iter_unpack(page)):
        if index and number == index:
            groups[number] = GroupRecord(number, raw.rstrip(b"\0").decode(errors="replace"), *values)
    return groups


def decode_record(values: tuple[int, ...]) -> Record | None:
    """Return the record of one unpacked slot, or None for an empty or incomplete one."""
    sequence, start, duration, launch, num_bytes, step, collective, microbatch, chunk, number, group, flags, check = (
        values
    )
    if sequence == 0 or check != sequence & _LOW_32_BITS:
        return None
    return Record(
        sequence=sequence,
        start_ns=start,
        duration_ns=None if duration == NO_VALUE else duration,
        launch_ns=launch,
        num_bytes=num_bytes,
        step=step,
        collective_sequence=collective,
        microbatch=microbatch,
        chunk=chunk,
        operation_number=number,
        group=group,
        flags=RecordFlag(flags),
    )


def step_total(record: Record) -> StepTotal:
    """Decode a STEP_TOTAL record."""
    return StepTotal(
        sequence=record.sequence,
        step=record.step,
        step_started_ns=record.start_ns,
        operation_number=record.operation_number,
        sum_ns=record.duration_ns or 0,
        max_ns=record.launch_ns,
        count=record.collective_sequence,
        num_bytes=record.num_bytes,
    )


def value_bits(value: float) -> int:
    """Return the 64 bits of a float. Every NaN gets the bits of math.nan, which differ from NO_VALUE."""
    return int(_FLOAT_BITS.unpack(_FLOAT.pack(value if value == value else math.nan))[0])


def recorded_value(record: Record) -> RecordedValue:
    """Decode a VALUE record. The value of a record that its writer left open is NaN."""
    bits = NO_VALUE if record.duration_ns is None else record.duration_ns
    (value,) = _FLOAT.unpack(_FLOAT_BITS.pack(bits))
    return RecordedValue(record.sequence, record.step, record.operation_number, record.start_ns, value)
