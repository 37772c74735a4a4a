"""The bytes: frozen offsets and operation numbers, the documentation's tables, every value encoded and decoded."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.black_box import encoding as layout
from megatrain.contracts.black_box import header_encoding
from megatrain.contracts.black_box.operations import MAX_OPERATIONS, Operation, operation_name
from megatrain.contracts.black_box.values import ClockBase, ControlPage, GroupRecord, Record, RecordFlag
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from tests.helpers.black_box_layout import encode_record, field_offsets, header_offsets
from tests.unit.contracts.conftest import make_identity, make_record

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "black-box.md"
TYPES = {"Q": "u64", "q": "i64", "I": "u32", "i": "i32", "H": "u16", "h": "i16"}

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
U16 = st.integers(0, 2**16 - 1)


def documented(heading: str) -> dict[str, tuple[int, str]]:
    """Return field -> (offset, type) of the table below a heading of the document."""
    section = re.split(r"\n###? ", DOCUMENT.read_text(encoding="ascii").split(f"# {heading}\n", 1)[1])[0]
    rows = re.findall(r"^\| (\d+) \| ([\w ]+) \| (\w+) \|", section, re.MULTILINE)
    return {name: (int(offset), kind) for offset, kind, name in rows}


def coded(offsets: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    return {name: (offset, TYPES.get(code) or f"{code[:-1]} bytes") for name, (offset, code) in offsets.items()}


def test_the_document_matches_the_code() -> None:
    for heading, offsets in {
        "Header page, fixed part": header_offsets(),
        "An entry of the list of axes": field_offsets(header_encoding.AXIS, header_encoding.AXIS_FIELDS),
        "Header page, words that change": {word.name: (8 * word, "Q") for word in layout.Word},
        "Control page": field_offsets(layout.CONTROL, layout.CONTROL_FIELDS),
        "Group page": field_offsets(layout.GROUP, layout.GROUP_FIELDS),
        "Records": field_offsets(layout.RECORD, layout.RECORD_FIELDS),
    }.items():
        assert documented(heading) == coded(offsets), heading


def test_every_field_is_aligned_to_its_size() -> None:
    tables = (
        header_offsets(),
        field_offsets(header_encoding.AXIS, header_encoding.AXIS_FIELDS),
        field_offsets(layout.GROUP, layout.GROUP_FIELDS),
        field_offsets(layout.CONTROL, layout.CONTROL_FIELDS),
        field_offsets(layout.RECORD, layout.RECORD_FIELDS),
    )
    for name, (offset, code) in ((name, field) for table in tables for name, field in table.items()):
        if not code.endswith("s"):
            assert offset % struct.calcsize("<" + code) == 0, name


def test_pages_have_their_documented_sizes() -> None:
    assert layout.RECORD.size == layout.RECORD_BYTES == 64
    assert layout.RECORD_BODY.size == 56
    assert layout.box_bytes(65536) == 3 * 4096 + 4 * 2**20
    offsets = field_offsets(layout.GROUP, layout.GROUP_FIELDS)
    assert offsets["entered"][0] == 8 * layout.GROUP_ENTERED_WORD
    assert offsets["left"][0] == 8 * layout.GROUP_LEFT_WORD
    assert layout.CONTROL.size <= layout.PAGE_BYTES
    assert header_offsets()["crc32"][0] < 8 * min(layout.Word)


def test_header_round_trip() -> None:
    for grid in (
        Layout(tp_size=8, pp_size=8, dp_size=192),
        Layout(tp_size=4, cp_size=2, pp_size=8, dp_size=192, ep_size=16),
    ):
        identity = make_identity(job="tr\u00e4um/1", layout=grid, rank=12_287)
        clock = ClockBase(10, 20, 3)
        page = header_encoding.encode_header(identity, clock, capacity=99).ljust(layout.PAGE_BYTES, b"\0")
        assert header_encoding.decode_header(page, "box") == (identity, clock, 99)
        assert identity.coordinate["pp"] == 7


def test_a_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match=r"job .* has 129 bytes, the field holds 128"):
        header_encoding.encode_header(make_identity(job="j" * 129), ClockBase(0, 0, 0), 1)
    with pytest.raises(DataError, match=r"group name .* has 33 bytes"):
        layout.encode_group(GroupRecord(1, "g" * 33, 0, 1, 1))


RECORDS = st.builds(
    Record, sequence=st.integers(1, 2**64 - 1), start_ns=U64, duration_ns=st.none() | st.integers(0, 2**64 - 2),
    launch_ns=U64, num_bytes=U64, step=st.integers(-1, 2**31 - 1), collective_sequence=U32,
    microbatch=st.integers(-1, 2**31 - 1), chunk=st.integers(-1, 2**15 - 1), operation_number=U16, group=U16,
    flags=st.integers(0, 31).map(RecordFlag),
)  # fmt: skip


@settings(max_examples=50, derandomize=True)
@given(RECORDS)
def test_record_round_trip(record: Record) -> None:
    assert layout.decode_record(layout.RECORD.unpack(encode_record(record))) == record


def test_an_empty_or_half_written_slot_is_no_record() -> None:
    whole = encode_record(make_record(9))
    assert layout.decode_record(layout.RECORD.unpack(bytes(64))) is None
    assert layout.decode_record(layout.RECORD.unpack(bytes(8) + whole[8:])) is None
    assert layout.decode_record(layout.RECORD.unpack(whole[:60] + b"\0\0\0\0")) is None


CONTROLS = st.builds(
    ControlPage, command_number=U64, command=U32, interval_ns=st.integers(0, 2**64 - 1), span_mask=U64,
    sample_period=U32, lease_ok_until_ns=U64, round=U64, written_ns=U64, stop_ns=U64,
)  # fmt: skip


@settings(max_examples=50, derandomize=True)
@given(CONTROLS, st.integers(0, 500))
def test_control_round_trip_and_every_flipped_bit_is_seen(page: ControlPage, bit: int) -> None:
    raw = layout.encode_control(page, seqlock=8)
    assert layout.decode_control(raw) == page
    assert layout.decode_control(layout.encode_control(page, seqlock=9)) is None
    flipped = bytearray(raw)
    place = 8 + bit // 8 % (len(raw) - 8)
    flipped[place] ^= 1 << bit % 8
    assert layout.decode_control(bytes(flipped)) is None


def test_a_control_field_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="does not fit"):
        layout.encode_control(ControlPage(sample_period=2**32), seqlock=0)


def test_groups_list_their_members() -> None:
    page = bytearray(4096)
    tp, link = GroupRecord(1, "tp", 4, 1, 2, entered=9, left=8), GroupRecord(63, "pp-backward", 5, -4, 2)
    for group in (tp, link):
        page[64 * group.number : 64 * group.number + 64] = layout.encode_group(group)
    page[64 * 5] = 7  # An entry whose number is not its place is unused.
    groups = layout.decode_groups(bytes(page))
    assert groups == {1: tp, 63: link}
    assert list(tp.ranks) == [4, 5]
    assert list(link.ranks) == [5, 1]
    assert len(GroupRecord(2, "odd", 3, 0, 5).ranks) == 0


FROZEN = {
    "step": 1, "data-wait": 2, "forward-compute": 3, "backward-compute": 4, "forward-send": 5, "forward-recv": 6,
    "backward-send": 7, "backward-recv": 8, "params-all-gather": 9, "grads-reduce-scatter": 10, "tp-all-gather": 11,
    "tp-reduce-scatter": 12, "tp-all-reduce": 13, "dp-all-reduce": 14, "pp-all-reduce": 15, "embedding-all-reduce": 16,
    "clip": 17, "optimizer": 18, "gc": 19, "checkpoint": 20, "checkpoint-load": 21, "evaluation": 22, "init": 23,
    "barrier": 24, "checkpoint-exchange": 25, "backward-weight-compute": 26, "checksum": 27, "cp-all-reduce": 28,
    "updates-all-to-all": 29, "data-read": 30, "picture-wait": 31, "picture-requests": 32,
}  # fmt: skip
ON_HOST = {"barrier", "checkpoint-exchange", "checksum"}
COLLECTIVES = {name for name, number in FROZEN.items() if 9 <= number <= 16}
COLLECTIVES |= {"cp-all-reduce", "updates-all-to-all"} | ON_HOST
POINT_TO_POINT = {"forward-send", "forward-recv", "backward-send", "backward-recv"}
COMPUTES = {"forward-compute", "backward-compute", "backward-weight-compute", "clip", "optimizer"}
ON_DEVICE = (COLLECTIVES | POINT_TO_POINT | COMPUTES) - ON_HOST


def test_names_and_numbers_never_change() -> None:
    found = {operation.value: operation.number for operation in Operation}
    # New operations may be added to both tables; with a changed or removed number, old files would be misread.
    assert found == FROZEN
    assert max(found.values()) < MAX_OPERATIONS, "the span mask has a bit for each"


def test_kinds_of_operations() -> None:
    assert {operation.value for operation in Operation if operation.is_collective} == COLLECTIVES
    assert {operation.value for operation in Operation if operation.is_point_to_point} == POINT_TO_POINT
    assert {operation.value for operation in Operation if operation.is_on_device} == ON_DEVICE


def test_operation_is_found_by_name_and_named_by_number() -> None:
    assert Operation("forward-compute") is Operation.FORWARD_COMPUTE
    assert f"{Operation.GC}" == "gc"
    assert operation_name(19) == "gc"
    assert operation_name(57) == "operation-57"
