"""Reading black boxes: complete, torn, wrapped, growing and damaged ones, and files of other kinds."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.commands.blackbox import json_values, lines_of
from megatrain.contracts.black_box.encoding import (
    CONTROL_OFFSET,
    HEADER_OFFSET,
    PAGE_BYTES,
    RECORD_BYTES,
    RING_OFFSET,
    Word,
    box_bytes,
)
from megatrain.contracts.black_box.reader import BlackBoxReader, read_black_box, write_control
from megatrain.contracts.black_box.values import ControlPage, GroupRecord, Phase, Record, RecordFlag, State
from megatrain.contracts.errors import DataError
from tests.helpers.black_box_layout import encode_record, header_offsets
from tests.unit.contracts.conftest import CAPACITY, box_image, make_identity, make_record

WriteBox = Callable[..., Path]
TP = GroupRecord(1, "tp", 4, 1, 2, entered=3, left=2)


def patch(path: Path, offset: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(raw)


def with_header(image: bytes, offset: int, word: int) -> bytes:
    """Return a black box with another word in the fixed part of its header, and the checksum of that header."""
    header = bytearray(image[: header_offsets()["crc32"][0]])
    struct.pack_into("<I", header, offset, word)
    return bytes(header) + struct.pack("<I", zlib.crc32(header)) + image[len(header) + 4 :]


def put_record(path: Path, record: Record) -> None:
    patch(path, RING_OFFSET + record.sequence % CAPACITY * RECORD_BYTES, encode_record(record))
    patch(path, 8 * Word.CURSOR, struct.pack("<Q", record.sequence))


def test_reader_returns_all_parts_of_a_black_box(write_box: WriteBox) -> None:
    done = make_record(1)
    open_one = make_record(2, duration_ns=None, group=1, collective_sequence=3, operation_number=11)
    total = make_record(3, flags=RecordFlag.STEP_TOTAL, duration_ns=900, launch_ns=500, collective_sequence=2)
    box = read_black_box(write_box([done, open_one, total], [TP]))
    assert box.identity == make_identity()
    assert box.records == (done, open_one)
    assert box.in_flight == (open_one,)
    assert open_one.operation == "tp-all-gather"
    assert box.groups == {1: TP}
    assert (box.totals[0].sum_ns, box.totals[0].max_ns, box.totals[0].count) == (900, 500, 2)
    assert (box.cursor, box.num_torn, box.state, box.ended_ns) == (3, 0, State.RUNNING, None)
    assert box.progress.phase is Phase.INIT
    assert box.progress.current_step is None
    assert box.control == ControlPage()
    assert box.newest_ns == done.start_ns + 500
    assert box.clock.unix_of(box.clock.monotonic_ns + 7) == box.clock.unix_ns + 7


def test_an_empty_ring_has_no_records(write_box: WriteBox) -> None:
    box = read_black_box(write_box())
    assert box.records == ()
    assert box.num_torn == 0


def test_torn_records_are_left_out_and_counted(write_box: WriteBox) -> None:
    path = write_box([make_record(sequence) for sequence in range(1, 6)])
    patch(path, RING_OFFSET + 2 * RECORD_BYTES, bytes(8))  # killed before the number was written again
    patch(path, RING_OFFSET + 4 * RECORD_BYTES + 8, bytes(56))  # the number of one record, the rest of another
    box = read_black_box(path)
    assert [record.sequence for record in box.records] == [1, 3, 5]
    assert box.num_torn == 2


def test_a_wrapped_ring_is_in_order(write_box: WriteBox) -> None:
    records = [make_record(sequence) for sequence in range(30, 30 + CAPACITY)]
    assert read_black_box(write_box(records)).records == tuple(records)


def test_a_record_that_changes_while_it_is_copied_is_left_out(
    write_box: WriteBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_box([make_record(sequence) for sequence in range(1, CAPACITY + 1)])
    real_pread, state = os.pread, {"ring_reads": 0}

    def pread(file: int, size: int, offset: int) -> bytes:
        raw = real_pread(file, size, offset)
        if offset >= RING_OFFSET:
            state["ring_reads"] += 1
            if state["ring_reads"] == 1:  # the writer overwrites the slot between the two copies
                put_record(path, make_record(CAPACITY + 3))
        return raw

    monkeypatch.setattr(os, "pread", pread)
    box = read_black_box(path)
    assert [record.sequence for record in box.records] == [1, 2, *range(4, CAPACITY + 1)]
    assert box.num_torn == 0


def test_records_since(write_box: WriteBox) -> None:
    path = write_box([make_record(sequence) for sequence in range(1, 6)])
    with BlackBoxReader(path) as reader:
        assert [record.sequence for record in reader.records_since(2)] == [3, 4, 5]
        assert reader.records_since(5) == ()
        for sequence in range(6, 6 + CAPACITY + 4):
            put_record(path, make_record(sequence))
        assert [record.sequence for record in reader.records_since(5)] == list(range(10, 26))


def test_records_since_sees_records_beyond_a_cursor_that_lags(write_box: WriteBox) -> None:
    path = write_box([make_record(sequence) for sequence in range(1, 8)])
    patch(path, 8 * Word.CURSOR, struct.pack("<Q", 5))  # two threads stored their cursors in the other order
    with BlackBoxReader(path) as reader:
        assert [record.sequence for record in reader.records_since(3)] == [4, 5, 6, 7]


def test_control_is_written_for_the_worker(write_box: WriteBox) -> None:
    path = write_box()
    page = ControlPage(command_number=4, command=2, interval_ns=5, span_mask=6, sample_period=10, round=9)
    write_control(path, page)
    with BlackBoxReader(path) as reader:
        found = reader.control()
        assert found is not None
        assert found.written_ns > 0
        assert (found.command_number, found.interval_ns, found.round) == (4, 5, 9)


def test_torn_control_page_is_reported_and_rewritten(write_box: WriteBox) -> None:
    path = write_box()
    patch(path, CONTROL_OFFSET, struct.pack("<Q", 7))
    assert read_black_box(path).control is None
    write_control(path, ControlPage(round=2))
    control = read_black_box(path).control
    assert control is not None
    assert control.round == 2


DAMAGED: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda image: image[:100], r"100 bytes, a black box has at least 12352; the file is truncated"),
    (lambda image: image[:-1], r"13311 bytes, expected 13312 for 16 records; the file is truncated"),
    (lambda image: image + b"x", r"13313 bytes, expected 13312"),
    (lambda image: b"\x7fELF" + image[4:], r"starts with b'\\x7fELFKBOX', expected b'MTBLKBOX'; this is not"),
    (lambda image: image[:8] + b"\3" + image[9:], r"black box version 3, this program reads version 2"),
    (lambda image: with_header(image, 36, 17), r"num_axes=17, expected at most 16"),
    (
        lambda image: with_header(image, 416, 0x7078),
        r"is inconsistent: a layout has no size 'xp_size'=2; its",
    ),
    (lambda image: with_header(image, 416 + 12, 0), r"is inconsistent: parallel\.pp_size=0 must be at least 1"),
    (lambda image: with_header(image, 416 + 12, 1), r"is inconsistent: rank 5 is outside the layout of 4"),
    (lambda image: with_header(image, 36, 0), r"is inconsistent: its list of axes lacks pp, dp, tp"),
    (lambda image: with_header(image, 36, 2**32 - 1), r"num_axes=4294967295, expected at most 16"),
    (lambda image: with_header(image, 416 + 16, 0x7070), r"its list of axes has 'pp' twice"),
    (lambda image: with_header(image, 416, 0x1B7078), r"a layout has no size 'xp\\x1b_size'=2; its sizes are pp"),
    (lambda image: with_header(image, 416 + 44, 4), r"world_size=8, but its axes \(pp_size=2 .*\) make 16 ranks"),
    (
        lambda image: image[:24] + b"\1" + image[25:],
        r"header checksum 0x\w+, expected 0x\w+; the header is damaged",
    ),
    (lambda image: image[: 8 * Word.PHASE] + b"\x63" + image[8 * Word.PHASE + 1 :], r"phase 99, expected 0 to 5"),
    (lambda image: image[: 8 * Word.STATE] + b"\x09" + image[8 * Word.STATE + 1 :], r"state 9, expected 0 to 2"),
    (
        lambda image: image[: 8 * Word.CURRENT_STEP] + struct.pack("<Q", 2**31) + image[8 * Word.CURRENT_STEP + 8 :],
        r"CURRENT_STEP=2147483648, expected 0 to 2147483647",
    ),
    (lambda image: b"", r"0 bytes, a black box has at least"),
]


def test_a_damaged_or_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank.blackbox"
    whole = bytes(box_image([make_record(1)]))
    for corrupt, message in DAMAGED:
        path.write_bytes(corrupt(whole))
        with pytest.raises(DataError, match=message) as caught:
            raise AssertionError(f"accepted: {read_black_box(path)}; expected: {message}")
        assert str(path) in str(caught.value)


def test_black_box_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot open the black box: No such file"):
        read_black_box(tmp_path / "absent")
    with pytest.raises(DataError, match="is not a regular file"):
        read_black_box(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: is not a regular file"):
        read_black_box(tmp_path / "pipe")
    with pytest.raises(DataError, match="absent"):
        write_control(tmp_path / "absent", ControlPage())
    (tmp_path / "text").write_text("hello\n" * 1000)
    before = (tmp_path / "text").read_bytes()
    with pytest.raises(DataError, match="this is not a black box"):
        write_control(tmp_path / "text", ControlPage())
    assert (tmp_path / "text").read_bytes() == before


def test_black_box_truncated_while_open_is_an_error(write_box: WriteBox) -> None:
    path = write_box([make_record(1)])
    with BlackBoxReader(path) as reader:
        os.truncate(path, PAGE_BYTES + 10)
        with pytest.raises(DataError, match="truncated while open"):
            reader.snapshot()
        os.truncate(path, HEADER_OFFSET)
        with pytest.raises(DataError, match="0 bytes at offset 0, expected 4096"):
            reader.progress()


IMAGE = bytes(
    box_image(
        [make_record(1), make_record(2, duration_ns=None, group=1), make_record(3, flags=RecordFlag.STEP_TOTAL)], [TP]
    )
)
# Meaningful bytes are changed more often than the zeros between them.
OFFSETS = (
    st.integers(0, box_bytes(CAPACITY) - 1)
    | st.integers(0, 419)
    | st.integers(8 * Word.CURSOR, 8 * Word.MEDIAN_STEP_NS + 7)
    | st.integers(CONTROL_OFFSET, CONTROL_OFFSET + 67)
    | st.integers(8192, 8192 + 191)
    | st.integers(RING_OFFSET, RING_OFFSET + 4 * RECORD_BYTES)
)
EDITS = st.lists(st.tuples(OFFSETS, st.binary(min_size=1, max_size=16)), max_size=8)


@pytest.mark.slow
@settings(max_examples=250, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EDITS, st.none() | st.integers(0, len(IMAGE)), st.binary(max_size=3))
def test_random_damage_gives_a_black_box_or_a_data_error(
    tmp_path: Path, edits: Sequence[tuple[int, bytes]], cut: int | None, tail: bytes
) -> None:
    image = bytearray(IMAGE)
    for offset, raw in edits:
        image[offset : offset + len(raw)] = raw[: len(image) - offset]
    path = tmp_path / "damaged"
    path.write_bytes(bytes(image[:cut]) + tail)
    message = str(path)
    try:
        with BlackBoxReader(path) as reader:
            box = reader.snapshot()
            reader.records_since(2)
        lines_of(box, box.records, box.newest_ns)
        json.dumps(json_values(box, box.records, box.newest_ns))
    except DataError as error:
        message = str(error)
    assert str(path) in message
