"""The bytes of a slot, and reading a slot while its worker may write it."""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.arena.slot_file import SlotReader, write_persist
from megatrain.arena.slot_layout import (
    HEADER_BYTES,
    Persist,
    SlotHeader,
    SlotState,
    SlotWord,
    SlotWords,
    decode_header,
    encode_header,
    slot_bytes,
)
from megatrain.contracts.errors import CheckpointError, MissingFileError

DIGEST = bytes(range(32))
WORDS = {word: 100 + number for number, word in enumerate(SlotWord)} | {
    SlotWord.STATE: SlotState.SEALED,
    SlotWord.PERSIST: Persist.PENDING,
}


def make_header(**changes: Any) -> SlotHeader:
    values = {"rank": 3, "slot": 1, "num_slots": 2, "contents_bytes": 1000, "plan_digest": DIGEST}
    return SlotHeader(**{**values, **changes})


def slot_file_bytes(header: SlotHeader, words: dict[SlotWord, int], contents: bytes) -> bytearray:
    raw = bytearray(HEADER_BYTES) + contents
    encoded = encode_header(header)
    raw[: len(encoded)] = encoded
    for word, value in words.items():
        struct.pack_into("<Q", raw, 8 * word, value)
    return raw


@pytest.fixture
def slot(tmp_path: Path) -> Path:
    path = tmp_path / "rank-00003.slot-1"
    path.write_bytes(slot_file_bytes(make_header(), WORDS, bytes(range(250)) * 4))
    return path


def test_bytes_of_a_slot_are_fixed(slot: Path) -> None:
    raw = slot.read_bytes()
    fixed = struct.pack("<8sIIIIQ32s", b"MTARENA1", 4096, 3, 1, 2, 1000, DIGEST)
    assert raw[: len(fixed)] == fixed
    assert raw[len(fixed) : len(fixed) + 4] == struct.pack("<I", zlib.crc32(fixed))
    assert len(raw) == slot_bytes(1000) == 4096 + 1000
    # Later writers of version 1 may only add fields: these numbers are in files on tmpfs of running jobs.
    assert {word.name: int(word) for word in SlotWord} == {
        "STATE": 128, "STEP": 129, "SNAPSHOT": 130, "ROUND": 131, "CONSUMED_SAMPLES": 132, "CONSUMED_TOKENS": 133,
        "NUM_UPDATES": 134, "NUM_SKIPPED": 135, "SEALED_UNIX_NS": 136, "PERSIST": 144,
    }  # fmt: skip
    assert [state.name for state in SlotState] == ["EMPTY", "WRITING", "SEALED"]
    assert [persist.name for persist in Persist] == ["NONE", "PENDING", "DONE", "FAILED"]


def test_a_slot_is_read(slot: Path) -> None:
    with SlotReader(slot) as reader:
        assert reader.header == make_header()
        assert reader.words() == SlotWords(
            state=SlotState.SEALED, step=101, snapshot=102, round=103, consumed_samples=104, consumed_tokens=105,
            num_updates=106, num_skipped=107, sealed_unix_ns=108, persist=Persist.PENDING,
        )  # fmt: skip
        buffer = bytearray(600)
        reader.read_contents_into(1, memoryview(buffer)[:500])
        assert buffer == (bytes(range(250)) * 3)[1:501] + bytes(100)
        reader.read_contents_into(1000, bytearray())


@settings(max_examples=50)
@given(
    st.builds(
        SlotHeader,
        rank=st.integers(0, 2**32 - 1),
        slot=st.just(0),
        num_slots=st.sampled_from([1, 2]),
        contents_bytes=st.integers(0, 2**63 - 1),
        plan_digest=st.binary(min_size=32, max_size=32),
    )
)
def test_headers_are_read_as_written(header: SlotHeader) -> None:
    page = encode_header(header).ljust(HEADER_BYTES, b"\0")
    assert decode_header(page, "x") == header
    for at in (0, 9, 20, 40, 66):
        damaged = page[:at] + bytes([page[at] ^ 4]) + page[at + 1 :]
        with pytest.raises(CheckpointError, match="x: "):
            decode_header(damaged, "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot": 2}, "slot=2 of num_slots=2, expected 1 or 2 slots"),
        ({"slot": -1}, "slot=-1 of num_slots=2"),
        ({"num_slots": 3}, "slot=1 of num_slots=3"),
        ({"rank": -1}, "rank=-1, expected 0 to"),
        ({"rank": 2**32}, "rank=4294967296, expected 0 to"),
        ({"contents_bytes": -1}, "contents_bytes=-1, expected"),
        ({"plan_digest": b"abc"}, "a plan digest of 3 bytes, expected 32"),
    ],
)
def test_invalid_header_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode_header(make_header(**changes))


def signed(*values: Any) -> bytes:
    fixed = struct.pack("<8sIIIIQ32s", b"MTARENA1", *values)
    return (fixed + struct.pack("<I", zlib.crc32(fixed))).ljust(HEADER_BYTES + 10, b"\0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"starts with b'', expected b'MTARENA1'; this is not an arena slot"),
        (b"MTBLKBOX" + bytes(5000), "starts with b'MTBLKBOX', expected"),
        (b"MTARENA1" + bytes(100), "108 bytes, and a slot has at least 4096"),
        (b"MTARENA1" + bytes(5000), "header checksum 0x00000000, expected 0x"),
        (signed(8192, 3, 1, 2, 10, DIGEST), "header_bytes=8192, version 1 has 4096"),
        (signed(4096, 3, 5, 2, 10, DIGEST), "slot=5 of num_slots=2"),
        (signed(4096, 3, 1, 2, 11, DIGEST), "4106 bytes, and its header requires 4107; the slot is truncated"),
        (signed(4096, 3, 1, 2, 9, DIGEST), "4106 bytes, and its header requires 4105"),
    ],
)
def test_file_that_is_not_a_slot_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rank-00003.slot-1"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"rank-00003.slot-1: {message}"):
        SlotReader(path)


def test_unreadable_slot_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="gone: no such slot"):
        SlotReader(tmp_path / "gone")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="link: the slot cannot be opened: Too many levels of symbolic links"):
        SlotReader(tmp_path / "link")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        SlotReader(tmp_path)
    # A FIFO must not block the reader.
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="fifo: "):
        SlotReader(tmp_path / "fifo")


@pytest.mark.parametrize(("word", "value"), [(SlotWord.STATE, 3), (SlotWord.PERSIST, 4)])
def test_unknown_state_is_named(slot: Path, word: SlotWord, value: int) -> None:
    slot.write_bytes(slot_file_bytes(make_header(), {**WORDS, word: value}, bytes(1000)))
    with SlotReader(slot) as reader, pytest.raises(CheckpointError, match=f"{slot}: {value} is not a valid"):
        reader.words()


def test_a_range_outside_the_contents_is_refused(slot: Path) -> None:
    with SlotReader(slot) as reader:
        for offset, end in ((0, 1001), (1000, 1001), (999, 1001)):
            message = f"bytes {offset} to {end} were requested, but the contents have 1000 bytes"
            with pytest.raises(CheckpointError, match=message):
                reader.read_contents_into(offset, bytearray(end - offset))


def test_a_slot_that_is_cut_while_open_is_an_error(slot: Path) -> None:
    with SlotReader(slot) as reader:
        os.truncate(slot, HEADER_BYTES + 10)
        with pytest.raises(CheckpointError, match="no bytes at 4106; the slot was truncated"):
            reader.read_contents_into(0, bytearray(20))
        os.truncate(slot, 100)
        with pytest.raises(CheckpointError, match="100 of 4096 bytes at 0"):
            reader.words()


def test_metadata_words_are_read_consistently(slot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker begins a snapshot between two reads: all words are from before it, or all from after it."""
    pages = [bytes(slot_file_bytes(make_header(), {**WORDS, SlotWord.STEP: step}, b"")) for step in (7, 8, 8)]
    with SlotReader(slot) as reader:
        monkeypatch.setattr(os, "pread", lambda *_: pages.pop(0))
        assert reader.words().step == 8
        assert not pages
        steps = iter(range(1000))
        monkeypatch.setattr(
            os, "pread", lambda *_: bytes(slot_file_bytes(make_header(), {**WORDS, SlotWord.STEP: next(steps)}, b""))
        )
        with pytest.raises(CheckpointError, match="the header changed in each of 100 reads"):
            reader.words()


def test_outcome_of_a_snapshot_is_recorded_once(slot: Path) -> None:
    def words() -> SlotWords:
        with SlotReader(slot) as reader:
            return reader.words()

    before = slot.read_bytes()
    assert not write_persist(slot, 101, Persist.DONE)
    assert slot.read_bytes() == before
    assert write_persist(slot, 102, Persist.FAILED)
    assert words().persist == Persist.FAILED
    assert write_persist(slot, 102, Persist.DONE)
    assert words().persist == Persist.DONE
    changed = slot.read_bytes()
    assert [at for at in range(len(before)) if before[at] != changed[at]] == [8 * SlotWord.PERSIST]
    slot.write_bytes(slot_file_bytes(make_header(), {**WORDS, SlotWord.STATE: SlotState.WRITING}, bytes(1000)))
    assert not write_persist(slot, 102, Persist.DONE)
    with pytest.raises(MissingFileError):
        write_persist(slot.with_name("gone"), 102, Persist.DONE)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 4095), st.binary(min_size=1, max_size=8))
def test_a_damaged_header_is_refused_or_harmless(slot: Path, at: int, content: bytes) -> None:
    raw = slot_file_bytes(make_header(), WORDS, bytes(1000))
    raw[at : at + len(content)] = content
    slot.write_bytes(raw[: HEADER_BYTES + 1000])
    if at >= 68:
        with SlotReader(slot) as reader:
            assert reader.header == make_header()
            with suppress(CheckpointError):
                reader.words()
    elif raw[:68] != slot_file_bytes(make_header(), {}, b"")[:68]:
        with pytest.raises(CheckpointError, match=f"^{slot}: "):
            SlotReader(slot)
