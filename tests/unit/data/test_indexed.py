"""The .bin/.idx format: compared with bytes assembled by hand, with Megatron-Core where installed, and with damage."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import DataError
from megatrain.data import indexed as indexed_module
from megatrain.data.indexed import INDEX_HEADER, IndexedDataset, index_path, token_dtype
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.summary import summarize
from tests.helpers.forked_program import run_forked
from tests.helpers.require import require
from tests.helpers.tiny_data import write_corpus

DOCUMENTS = [[5, 6, 7], [300], [0, 65499]]
# Field by field from the format's specification: magic, version 1, code 8 (uint16), 3 sequences, 4 bounds.
GOLDEN_INDEX = (
    b"MMIDIDX\x00\x00"
    + bytes.fromhex("0100000000000000 08 0300000000000000 0400000000000000")
    + bytes.fromhex("03000000 01000000 02000000")
    + bytes.fromhex("0000000000000000 0600000000000000 0800000000000000")
    + bytes.fromhex("0000000000000000 0100000000000000 0200000000000000 0300000000000000")
)
GOLDEN_DATA = bytes.fromhex("0500 0600 0700 2c01 0000 dbff")


def test_files_are_the_golden_bytes(write_tokens: Callable[..., Path]) -> None:
    prefix = write_tokens(DOCUMENTS)
    assert Path(f"{prefix}.idx").read_bytes() == GOLDEN_INDEX
    assert Path(f"{prefix}.bin").read_bytes() == GOLDEN_DATA


def test_reader_returns_what_was_written(write_tokens: Callable[..., Path]) -> None:
    dataset = IndexedDataset(write_tokens(DOCUMENTS))
    assert (dataset.num_tokens, dataset.num_sequences, dataset.num_documents) == (6, 3, 3)
    assert [dataset.document(number).tolist() for number in range(3)] == DOCUMENTS
    assert dataset.window(2, 3).tolist() == [7, 300, 0]
    assert dataset.document_starts_between(0, 6).tolist() == [0, 3, 4]
    assert dataset.document_starts_between(1, 4).tolist() == [3]
    assert dataset.document_starts_between(5, 6).tolist() == []


def test_large_vocabularies_take_int32(write_tokens: Callable[..., Path]) -> None:
    assert (token_dtype(65499).name, token_dtype(65500).name) == ("uint16", "int32")
    prefix = write_tokens([[70_000, 1]], vocab_size=128_256)
    assert Path(f"{prefix}.idx").read_bytes()[17] == 4
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<2i", 70_000, 1)
    assert IndexedDataset(prefix).document(0).tolist() == [70_000, 1]


def test_documents_of_several_sequences_are_read(tmp_path: Path) -> None:
    # Two documents: sequences 0 and 1, sequence 2.
    index = GOLDEN_INDEX[:26] + struct.pack("<Q", 3) + GOLDEN_INDEX[34:70] + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "t.idx").write_bytes(index)
    (tmp_path / "t.bin").write_bytes(GOLDEN_DATA)
    dataset = IndexedDataset(tmp_path / "t")
    assert [dataset.document(number).tolist() for number in range(2)] == [[5, 6, 7, 300], [0, 65499]]


def test_starts_of_documents_are_those_of_a_plain_search(tmp_path: Path) -> None:
    """Documents with no, one and several sequences; sequences with no tokens."""
    random = np.random.default_rng(5)
    lengths = random.integers(0, 4, 60)
    bounds = np.sort(np.concatenate(([0, 0, 60, 60], random.integers(0, 61, 30))))
    pointers = np.cumsum(lengths) - lengths
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(bounds))
    parts = (lengths.astype("<i4"), (2 * pointers).astype("<i8"), bounds.astype("<i8"))
    (tmp_path / "t.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    (tmp_path / "t.bin").write_bytes(bytes(2 * int(lengths.sum())))
    dataset = IndexedDataset(tmp_path / "t")
    starts = [dataset.document_start(number) for number in range(dataset.num_documents)]
    for first, last in itertools.combinations(range(dataset.num_tokens + 1), 2):
        expected = [start for start in starts if first <= start < last]
        assert dataset.document_starts_between(first, last).tolist() == expected


@pytest.mark.parametrize("length", [1, 104_729, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_document_of_any_length_comes_back(tmp_path: Path, length: int) -> None:
    tokens = np.arange(length) % 65_521
    with IndexedWriter(tmp_path / "t", token_dtype(65_499)) as writer:
        for document in (tokens, tokens[:1], tokens):
            writer.add_document(document)
    dataset = IndexedDataset(tmp_path / "t")
    assert dataset.sequence_lengths.tolist() == [length, 1, length]
    assert np.array_equal(dataset.document(2), tokens)
    assert dataset.window(length - 1, 3).tolist() == [int(tokens[-1]), 0, 0]
    assert summarize(dataset).length_max == length


@pytest.mark.slow
def test_megatron_core_joins_and_divides_documents_as_we_do(write_tokens: Callable[..., Path], tmp_path: Path) -> None:
    """Megatron-Core's documents of several sequences, and its union of two pairs."""
    require("megatron-core", find_spec("megatron") is not None, "its data set is the oracle of the file format")
    pieces = [[[5, 6], [7]], [[300]], [[], [0, 65499], [1]]]
    other = str(write_tokens(DOCUMENTS, "other"))
    script = f"""
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
for prefix in ("theirs", "union"):
    builder = IndexedDatasetBuilder(f"{tmp_path}/{{prefix}}.bin", dtype=DType.optimal_dtype(4096))
    for document in {pieces!r}:
        builder.add_document(torch.tensor(sum(document, [])), [len(piece) for piece in document])
    if prefix == "union":
        builder.add_index({other!r})
    builder.finalize(f"{tmp_path}/{{prefix}}.idx")
"""
    result = run_forked(["-c", script])
    assert result.returncode == 0, result.stderr
    theirs = IndexedDataset(tmp_path / "theirs")
    assert [theirs.document(number).tolist() for number in range(3)] == [[5, 6, 7], [300], [0, 65499, 1]]
    with IndexedWriter(tmp_path / "ours", token_dtype(4096)) as writer:
        writer.add_all(theirs)
        writer.add_all(IndexedDataset(Path(other)))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"union{suffix}").read_bytes()


@pytest.mark.slow
def test_megatron_core_reads_our_files_and_writes_the_same(write_tokens: Callable[..., Path], tmp_path: Path) -> None:
    require("megatron-core", find_spec("megatron") is not None, "its data set is the oracle of the file format")
    sizes = (4096, 128_256)
    ours = [str(write_tokens(DOCUMENTS, f"ours{size}", size)) for size in sizes]
    theirs = [str(tmp_path / f"theirs{size}") for size in sizes]
    # In a separate process: importing it changes much of torch and takes seconds.
    script = f"""
import json, torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from tests.helpers.waiting import DEADLINE_S
for vocab_size, prefix, other in zip({sizes!r}, {ours!r}, {theirs!r}):
    dataset = IndexedDataset(prefix)
    builder = IndexedDatasetBuilder(other + ".bin", dtype=DType.optimal_dtype(vocab_size))
    for document in {DOCUMENTS!r}:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(other + ".idx")
    print(json.dumps([dataset[number].tolist() for number in range(len(dataset))]))
"""
    result = run_forked(["-c", script])
    assert result.returncode == 0, result.stderr
    read = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[[")]
    assert read == [DOCUMENTS, DOCUMENTS]
    for prefix, other in zip(ours, theirs, strict=True):
        for suffix in (".bin", ".idx"):
            assert Path(f"{prefix}{suffix}").read_bytes() == Path(f"{other}{suffix}").read_bytes()


def with_bytes(offset: int, value: bytes) -> bytes:
    """Return the index with other bytes at an offset."""
    return GOLDEN_INDEX[:offset] + value + GOLDEN_INDEX[offset + len(value) :]


def with_counts(num_sequences: int, num_bounds: int) -> bytes:
    return with_bytes(18, struct.pack("<QQ", num_sequences, num_bounds))


LENGTH = r"t\.idx: an index of \d+ sequences and \d+ bounds takes"
OTHER_DATA = (
    r"t\.bin: the tokens that .*t\.idx lists takes 12 bytes, found {}; .* \.bin and \.idx belong to different data"
)
DAMAGED: dict[str, tuple[bytes, bytes, str]] = {
    "no index": (b"", GOLDEN_DATA, r"t\.idx: an index header takes 34 bytes, found 0"),
    "part of a header": (GOLDEN_INDEX[:20], GOLDEN_DATA, r"t\.idx: an index header takes 34 bytes, found 20"),
    "only a header": (
        GOLDEN_INDEX[:34], GOLDEN_DATA, r"t\.idx: an index of 3 sequences and 4 bounds takes 102 bytes, found 34"
    ),
    "a byte less of the index": (GOLDEN_INDEX[:101], GOLDEN_DATA, rf"{LENGTH} 102 bytes, found 101"),
    "a mode per sequence": (
        GOLDEN_INDEX + bytes(3), GOLDEN_DATA,
        r"t\.idx: has a mode for each sequence, from byte 102 on, as in multimodal data",
    ),
    "a byte less of the tokens": (GOLDEN_INDEX, GOLDEN_DATA[:-1], OTHER_DATA.format(11)),
    "one token": (GOLDEN_INDEX, GOLDEN_DATA[:2], OTHER_DATA.format(2)),
    "no tokens": (GOLDEN_INDEX, b"", OTHER_DATA.format(0)),
    "a token more": (GOLDEN_INDEX, GOLDEN_DATA + b"\0\0", OTHER_DATA.format(14)),
    "another magic": (with_bytes(0, b"PK\x03\x04"), GOLDEN_DATA, r"t\.idx: starts with b'PK.*this is another kind of"),
    "another version": (with_bytes(9, b"\x02"), GOLDEN_DATA, r"t\.idx: is version 2 .*only version 1 is supported"),
    "another type": (with_bytes(17, b"\x06"), GOLDEN_DATA, r"t\.idx: has tokens of type code 6"),
    "another length": (
        with_bytes(38, b"\x02"), GOLDEN_DATA,
        r"t\.idx: sequence 2 of 4 bytes lies at byte 8, but the lengths before it add up to 10",
    ),
    "a negative length that the offsets agree with": (
        with_bytes(34, struct.pack("<3i3q", 5, -1, 2, 0, 10, 8)), GOLDEN_DATA,
        r"t\.idx: sequence 1 of -2 bytes lies at byte 10",
    ),
    "another offset": (
        with_bytes(54, b"\x05"), GOLDEN_DATA,
        r"t\.idx: sequence 1 of 2 bytes lies at byte 5, but the lengths before it add up to 6",
    ),
    "bounds that end early": (
        with_bytes(94, b"\x02"), GOLDEN_DATA,
        r"t\.idx: document bounds run from 0 to 2, but must rise from 0 to the 3 sequences",
    ),
    "bounds that fall": (with_bytes(78, b"\x03"), GOLDEN_DATA, r"t\.idx: .* bounds run from 0 to 3, but"),
    "too many sequences": (with_counts(2**64 - 1, 4), GOLDEN_DATA, LENGTH),
    "too many bounds": (with_counts(3, 2**64 - 1), GOLDEN_DATA, LENGTH),
    "too many of both": (with_counts(2**63, 2**63), GOLDEN_DATA, LENGTH),
    "no sequences": (with_counts(0, 6), GOLDEN_DATA, rf"({LENGTH}|t\.idx: holds no documents)"),
    "no bounds": (with_counts(5, 1), GOLDEN_DATA, rf"({LENGTH}|t\.idx: holds no documents)"),
}  # fmt: skip


def test_damaged_pair_is_refused(tmp_path: Path) -> None:
    for name, (index, data, message) in DAMAGED.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "t.idx").write_bytes(index)
        (folder / "t.bin").write_bytes(data)
        with pytest.raises(DataError, match=message):
            IndexedDataset(folder / "t")


COUNTS = [0, 1, 2, 3, 4, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
CHANGES = st.one_of(
    st.tuples(
        st.integers(0, len(GOLDEN_INDEX) - 8), st.sampled_from(COUNTS).map(lambda count: struct.pack("<Q", count))
    ),
    st.tuples(st.integers(0, len(GOLDEN_INDEX) - 1), st.binary(min_size=1, max_size=1)),
)


@pytest.mark.slow
@settings(max_examples=500, derandomize=True)
@given(changes=st.lists(CHANGES, min_size=1, max_size=3), tail=st.binary(max_size=12), data=st.binary(max_size=24))
def test_any_index_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]], tail: bytes, data: bytes
) -> None:
    prefix = tmp_path_factory.getbasetemp() / "hostile"
    index = bytearray(GOLDEN_INDEX)
    for at, change in changes:
        index[at : at + len(change)] = change
    for index_tail, content in ((tail, data), (b"", GOLDEN_DATA)):
        Path(f"{prefix}.idx").write_bytes(index + index_tail)
        Path(f"{prefix}.bin").write_bytes(content)
        with suppress(DataError):  # A file is refused, or all ways to read it agree.
            dataset = IndexedDataset(prefix, vocab_size=65536)
            read = np.concatenate([dataset.document(number) for number in range(dataset.num_documents)])
            assert read.tolist() == dataset.tokens_at(np.arange(dataset.num_tokens)).tolist()
            summarize(dataset)


def test_files_of_a_checked_version_are_not_checked_again(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "t", 1000, 90)
    index = index_path(prefix)
    checked, status = IndexedDataset(prefix).version, index.stat()
    with index.open("r+b") as file:
        file.seek(INDEX_HEADER.size)
        file.write(struct.pack("<i", 1 << 20))
    os.utime(index, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert IndexedDataset(prefix, checked_version=checked).version == checked
    with pytest.raises(DataError, match="the index is damaged"):
        IndexedDataset(prefix)
    os.utime(index, ns=(0, 0))
    with pytest.raises(DataError, match="the index is damaged"):
        IndexedDataset(prefix, checked_version=checked)


def test_lengths_that_no_file_can_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_module, "_CHECK_BLOCK", 2)
    monkeypatch.setattr(indexed_module, "_LARGEST_FILE_BYTES", 2**34)
    # The third sequence would not be checked: sums beyond the largest file may exceed int64.
    lengths = [2**31 - 1] * 5
    pointers = [8 * sum(lengths[:number]) for number in range(5)]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 5, 5, 2)
    (tmp_path / "t.idx").write_bytes(header + struct.pack("<5i5q2q", *lengths, *pointers, 0, 5))
    (tmp_path / "t.bin").write_bytes(GOLDEN_DATA)
    with pytest.raises(DataError, match=rf"t\.bin: the tokens that .* lists takes {16 * (2**31 - 1)} bytes, found 12"):
        IndexedDataset(tmp_path / "t")


def test_ids_of_no_vocabulary_are_not_counted(tmp_path: Path) -> None:
    for code, form, token in [(5, "<q", 2**62), (4, "<i", 2**31 - 1), (3, "<h", -1)]:
        header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, 1, 2)
        prefix = tmp_path / f"code-{code}"
        Path(f"{prefix}.idx").write_bytes(header + struct.pack("<i3q", 1, 0, 0, 1))
        Path(f"{prefix}.bin").write_bytes(struct.pack(form, token))
        with pytest.raises(DataError, match=rf"code-{code}\.bin: holds the token id {token}[,;] "):
            summarize(IndexedDataset(prefix))


def test_empty_and_missing_files_are_refused(write_tokens: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"nothing\.idx: cannot be read: No such file .* give the prefix of a \.bin/\.idx"
    ):
        IndexedDataset(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"none\.idx: holds no documents"):
        IndexedDataset(write_tokens([], "none"))
    with pytest.raises(DataError, match=r"blank\.bin: holds no tokens"):
        IndexedDataset(write_tokens([[]], "blank"))
    prefix = write_tokens(DOCUMENTS)
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DataError, match=r"tokens\.bin: cannot be read"):
        IndexedDataset(prefix)


def test_window_outside_the_vocabulary_is_refused(write_tokens: Callable[..., Path]) -> None:
    dataset = IndexedDataset(write_tokens(DOCUMENTS), vocab_size=300)
    assert dataset.window(0, 3).tolist() == [5, 6, 7]
    with pytest.raises(
        DataError,
        match=r"tokens\.bin at byte 6 \(document \d\): token id 300 at position 3 is outside model\.vocab_size=300",
    ):
        dataset.window(1, 3)


def test_corpus_appears_at_close_and_not_after_an_error(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "t", token_dtype(100))
    writer.add_document(np.array([1, 2]))
    assert not (tmp_path / "t.bin").exists()
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["t.bin", "t.idx"]

    with (
        pytest.raises(DataError, match=r"bad\.bin: document 1 has token ids 1 to 70000, and uint16 holds 0 to 65535"),
        IndexedWriter(tmp_path / "bad", token_dtype(100)) as writer,
    ):
        writer.add_document(np.array([1, 2]))
        writer.add_document(np.array([1, 70_000]))
    assert sorted(os.listdir(tmp_path)) == ["t.bin", "t.idx"]


@pytest.mark.parametrize("num_synced", [0, 1])
def test_a_full_disk_at_close_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_synced: int) -> None:
    writer = IndexedWriter(tmp_path / "t", token_dtype(100))
    writer.add_document(np.array([1, 2]))
    synced: list[int] = []

    def fail(descriptor: int) -> None:
        if len(synced) == num_synced:
            raise OSError(28, "No space left on device")
        synced.append(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert os.listdir(tmp_path) == []
