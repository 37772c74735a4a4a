"""Black boxes that tests write with the layout's own encoders, without the writer of megatrain.telemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatrain.contracts.black_box.encoding import (
    CONTROL_OFFSET,
    GROUP_BYTES,
    GROUPS_OFFSET,
    NO_VALUE,
    RECORD_BYTES,
    RING_OFFSET,
    Word,
    box_bytes,
    encode_control,
    encode_group,
)
from megatrain.contracts.black_box.header_encoding import encode_header
from megatrain.contracts.black_box.values import ClockBase, ControlPage, GroupRecord, Identity, Record, RecordFlag
from megatrain.contracts.layout import Layout
from tests.helpers.black_box_layout import encode_record

CAPACITY = 16


def make_identity(**changes: object) -> Identity:
    values = {
        "job": "demo", "branch": "main", "round": 3, "rank": 5, "layout": Layout(tp_size=2, pp_size=2, dp_size=2),
        "pid": 4321, "host": "host-07",
    }  # fmt: skip
    return Identity(**{**values, **changes})


def make_record(sequence: int, **changes: object) -> Record:
    values = {
        "sequence": sequence, "start_ns": 1_000_000 + sequence, "duration_ns": 500, "launch_ns": 1_000_000 + sequence,
        "num_bytes": 64 * sequence, "step": 7, "collective_sequence": 0, "microbatch": sequence % 4, "chunk": -1,
        "operation_number": 3, "group": 0, "flags": RecordFlag.NONE,
    }  # fmt: skip
    return Record(**{**values, **changes})


def box_image(records: Sequence[Record], groups: Sequence[GroupRecord] = (), capacity: int = CAPACITY) -> bytearray:
    """Return the bytes of a black box with these records in their slots."""
    image = bytearray(box_bytes(capacity))
    header = encode_header(make_identity(), ClockBase(1_000_000, 1_700_000_000_000_000_000, 50), capacity)
    image[: len(header)] = header
    words = memoryview(image).cast("Q")
    for word in Word:
        if word in (Word.CURRENT_STEP, Word.COMPLETED_STEP, Word.LAST_STEP_NS, Word.MEDIAN_STEP_NS):
            words[word] = NO_VALUE
    words[Word.CURSOR] = max((record.sequence for record in records), default=0)
    words.release()
    control = encode_control(ControlPage(), seqlock=0)
    image[CONTROL_OFFSET : CONTROL_OFFSET + len(control)] = control
    for group in groups:
        offset = GROUPS_OFFSET + group.number * GROUP_BYTES
        image[offset : offset + GROUP_BYTES] = encode_group(group)
    for record in records:
        offset = RING_OFFSET + record.sequence % capacity * RECORD_BYTES
        image[offset : offset + RECORD_BYTES] = encode_record(record)
    return image


@pytest.fixture
def write_box(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a black box with some records and returns its path."""

    def write(records: Sequence[Record] = (), groups: Sequence[GroupRecord] = ()) -> Path:
        path = tmp_path / "rank.blackbox"
        path.write_bytes(box_image(records, groups))
        return path

    return write
