"""Packed samples: each label once, bins as full as with best fit, their file, and reading it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatrain.cli import main
from megatrain.contracts.errors import DataError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.data.bins import BINS_HEADER, PackedBins, bins_path, write_bins
from megatrain.data.block_sums import BLOCK_BYTES
from megatrain.data.indexed import IndexedDataset
from megatrain.data.order import PackedOrder
from megatrain.data.packing import BLOCK_DOCUMENTS, PackedBlock, best_fit, pack_block
from megatrain.data.verification import verify_data
from tests.helpers.one_source import reader_of_one
from tests.helpers.step_plans import step_plan

SEQ_LEN = 16
LENGTHS = (1, 5, 17, 3, 40, 16, 2, 1, 9, 33, 7, 18, 2)
"""Lengths of documents: without a label, prime, of one sample and one token more, of several samples."""


def packed(lengths: Sequence[int], seq_len: int) -> PackedBlock:
    sizes = np.array(lengths, dtype=np.int64)
    return pack_block(np.cumsum(sizes) - sizes, sizes, seq_len)


def by_hand(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return the bins of best fit decreasing, by comparing every bin for every item."""
    rooms: list[int] = []
    bins = [-1] * len(lengths)
    for item in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[item]]
        chosen = min(fitting, key=lambda number: rooms[number], default=len(rooms))
        if chosen == len(rooms):
            rooms.append(capacity)
        rooms[chosen] -= lengths[item]
        bins[item] = chosen
    return bins


@given(st.lists(st.integers(0, 90), max_size=60), st.integers(1, 40))
def test_each_label_is_in_one_piece_of_its_document(lengths: list[int], seq_len: int) -> None:
    found = packed(lengths, seq_len)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    seen = []
    for start, labels in found.pieces.tolist():
        assert 0 < labels <= seq_len
        seen += range(start + 1, start + labels + 1)
        assert len(set(document_of[start : start + labels + 1].tolist())) == 1
    firsts = set((np.cumsum(lengths) - lengths).tolist()) if lengths else set()
    assert sorted(seen) == [position for position in range(sum(lengths)) if position not in firsts]
    sizes = np.add.reduceat(found.pieces["labels"], found.bounds[:-1]) if found.num_bins else np.zeros(0)
    assert (sizes <= seq_len).all()
    assert found.num_left_out == sum(length < 2 for length in lengths)


@given(st.lists(st.integers(1, 30), max_size=60))
def test_bins_are_as_full_as_best_fit_makes_them(lengths: list[int]) -> None:
    found, expected = best_fit(np.array(lengths, dtype=np.int64), 30), by_hand(lengths, 30)

    def loads(bins: Sequence[int]) -> list[tuple[int, ...]]:
        return sorted(
            tuple(sorted(size for size, one in zip(lengths, bins, strict=True) if one == bin)) for bin in set(bins)
        )

    assert len(set(found.tolist())) == len(set(expected))
    # Bins with the same remaining space are equal choices, so only the multiset of remaining spaces is determined.
    assert sorted(map(sum, loads(found.tolist()))) == sorted(map(sum, loads(expected)))


def test_documents_of_a_long_tail_waste_little() -> None:
    lengths = np.maximum(1, np.random.default_rng(1).lognormal(6.0, 1.3, 20_000)).astype(np.int64)
    found = packed(lengths.tolist(), 8192)
    assert 1 - found.pieces["labels"].sum() / (found.num_bins * 8192) < 0.001


@pytest.fixture
def dataset(write_tokens: Callable[..., Path]) -> IndexedDataset:
    """Documents whose tokens are their own positions in the stream."""
    ends = np.cumsum(LENGTHS)
    return IndexedDataset(
        write_tokens([range(end - length, end) for length, end in zip(LENGTHS, ends, strict=True)]), 4096
    )


def read_epoch(dataset: IndexedDataset, dp_size: int, epoch: int = 0) -> list[tuple[Any, ...]]:
    """Return the samples of an epoch in their order: number, tokens, labels and documents of each."""
    order = PackedOrder.of(dataset, SEQ_LEN, seed=3)
    reader = reader_of_one(dataset, order, has_document_mask=True)
    size = order.samples_per_epoch
    found = []
    for rank in range(dp_size):
        step = reader.read_step(step_plan(epoch * size, size, dp_size), rank)
        for one in step.microbatches:
            assert one.document_SB is not None
            found.append(
                (
                    one.sample_B.tolist(),
                    *(part[:, 0].tolist() for part in (one.tokens_SB, one.labels_SB, one.document_SB)),
                )
            )
    return sorted(found)


def test_packed_samples_hold_whole_documents_and_padding(dataset: IndexedDataset) -> None:
    write_bins(dataset, SEQ_LEN)
    samples = read_epoch(dataset, dp_size=1)
    ends = np.cumsum(LENGTHS)
    document_of = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    labels_seen = []
    for _, tokens, labels, documents in samples:
        real = [place for place, label in enumerate(labels) if label != IGNORED_LABEL]
        assert real == list(range(len(real)))  # Padding is at the end, in a separate document.
        assert len(set(documents[len(real) :])) <= 1
        assert not set(documents[len(real) :]) & set(documents[: len(real)])
        for place in real:
            assert labels[place] == tokens[place] + 1
            same = documents[place] == documents[0]
            assert same == (document_of[tokens[place]] == document_of[tokens[0]])
        labels_seen += [labels[place] for place in real]
    assert sorted(labels_seen) == sorted(set(range(int(ends[-1]))) - set((ends - LENGTHS).tolist()))


def test_packed_samples_are_the_same_on_every_layout(dataset: IndexedDataset) -> None:
    write_bins(dataset, SEQ_LEN)
    epochs = [read_epoch(dataset, 1, epoch) for epoch in (0, 1)]
    for dp_size in (2, 3):
        assert read_epoch(dataset, dp_size) == epochs[0]
    contents = [[sample[1:] for sample in epoch] for epoch in epochs]
    assert contents[0] != contents[1]
    assert sorted(contents[0]) == sorted(contents[1])


@pytest.mark.slow
def test_the_file_does_not_depend_on_the_processes(write_tokens: Callable[..., Path]) -> None:
    """Two blocks of documents, which two processes pack."""
    num_documents = BLOCK_DOCUMENTS + 700
    lengths = np.random.default_rng(7).integers(1, 9, num_documents).tolist()
    dataset = IndexedDataset(write_tokens([range(length) for length in lengths]))
    whole = write_bins(dataset, SEQ_LEN)
    content = bins_path(dataset.prefix, SEQ_LEN).read_bytes()
    assert whole.num_labels == sum(lengths) - num_documents
    progress: list[tuple[int, int]] = []
    assert write_bins(dataset, SEQ_LEN, num_workers=2, report=lambda *done: progress.append(done)) == whole
    assert progress == [(BLOCK_DOCUMENTS, num_documents), (num_documents, num_documents)]
    assert bins_path(dataset.prefix, SEQ_LEN).read_bytes() == content
    assert verify_data(dataset.prefix)[0].problems == ()


def test_a_write_that_is_stopped_keeps_the_file_of_before(dataset: IndexedDataset) -> None:
    write_bins(dataset, SEQ_LEN)
    path = bins_path(dataset.prefix, SEQ_LEN)
    before, names = path.read_bytes(), sorted(os.listdir(path.parent))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bins(dataset, SEQ_LEN, report=stop)
    assert (path.read_bytes(), sorted(os.listdir(path.parent))) == (before, names)


def patched(path: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


# name -> how the file is changed, and the messages of its reader and of `data verify`
DAMAGES: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "cut off": (lambda content: content.__delitem__(slice(-8, None)), "its header describes"),
    "no header": (lambda content: content.__delitem__(slice(20, None)), "less than its header"),
    "magic": (lambda content: content.__setitem__(0, 0), "has magic"),
    "version": (lambda content: content.__setitem__(8, 9), "version 9"),
    "other length": (lambda content: content.__setitem__(16, 17), "seq_len 17"),
    "counts": (lambda content: content.__setitem__(56, content[56] ^ 1), "its header, at byte 0, differs"),
    "other data": (lambda content: content.__setitem__(24, ord("x")), "was made for data with digest x"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_with_the_command(dataset: IndexedDataset, name: str) -> None:
    write_bins(dataset, SEQ_LEN)
    path = bins_path(dataset.prefix, SEQ_LEN)
    change, text = DAMAGES[name]
    patched(path, change)
    with pytest.raises(DataError) as refused:
        PackedBins(dataset, SEQ_LEN)
    assert str(refused.value).startswith(f"{path}: ")
    assert text in str(refused.value)
    assert f"`megatrain data pack {dataset.prefix} --seq-len {SEQ_LEN} --force`" in str(refused.value)
    (problem,) = verify_data(dataset.prefix)[0].problems
    assert (problem.file, problem.offset) == (str(path), None)


@pytest.mark.parametrize(
    ("place", "what"),
    [(BINS_HEADER.size, "piece"), (-12, "bound of blocks"), (-28, "last bound"), (-36, "bound"), (-4, "sum")],
)
def test_verify_names_the_byte_that_differs(dataset: IndexedDataset, place: int, what: str) -> None:
    write_bins(dataset, SEQ_LEN)
    assert verify_data(dataset.prefix)[0].problems == ()
    path = bins_path(dataset.prefix, SEQ_LEN)
    patched(path, lambda content: content.__setitem__(place, content[place] ^ 1))
    (problem,) = verify_data(dataset.prefix)[0].problems
    assert problem.offset == place % path.stat().st_size
    assert "differs from what packing makes" in problem.text


def test_a_damaged_page_is_refused_when_it_is_read(write_tokens: Callable[..., Path]) -> None:
    """For any flipped bit: a sample that touches the page is refused, and all others are unchanged."""
    generator = np.random.default_rng(5)
    dataset = IndexedDataset(write_tokens([range(length) for length in generator.integers(1, 40, 500).tolist()]))
    write_bins(dataset, SEQ_LEN)
    path = bins_path(dataset.prefix, SEQ_LEN)
    content = path.read_bytes()
    whole = PackedBins(dataset, SEQ_LEN)
    numbers = [np.array([number]) for number in range(whole.num_bins)]
    before = [whole.read(number)[0].tolist() for number in numbers]
    assert [piece for bin in before for piece in bin] == whole.read(np.concatenate(numbers))[0].tolist()
    num_bytes = whole.pieces.nbytes + whole.bounds.nbytes + whole.bounds_of_blocks.nbytes
    assert num_bytes > 2 * BLOCK_BYTES
    for place in generator.integers(0, len(content) - BINS_HEADER.size, 12).tolist():
        block = place // BLOCK_BYTES if place < num_bytes else (place - num_bytes) // 4
        changed = bytearray(content)
        changed[BINS_HEADER.size + place] ^= 1 << int(generator.integers(8))
        path.write_bytes(changed)
        damaged, errors = PackedBins(dataset, SEQ_LEN), []
        for number, pieces in zip(numbers, before, strict=True):
            try:
                assert damaged.read(number)[0].tolist() == pieces
            except DataError as error:
                errors.append(str(error))
        assert 0 < len(errors) < len(numbers)
        (text,) = set(errors)
        first = BINS_HEADER.size + block * BLOCK_BYTES
        assert text.startswith(f"{path} at byte {first}: the {BLOCK_BYTES} bytes from here on differ")
        assert "--force`" in text


def test_pack_command_makes_the_file_once(dataset: IndexedDataset, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "pack", str(dataset.prefix), "--seq-len", str(SEQ_LEN)]
    assert main([*words, "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["num_labels"]) == (
        str(bins_path(dataset.prefix, SEQ_LEN)),
        sum(LENGTHS) - len(LENGTHS),
    )
    assert found["waste"] == pytest.approx(1 - found["num_labels"] / (SEQ_LEN * found["num_bins"]))
    assert main(words) == ExitCode.DATA
    assert "exists; replace it with --force" in capsys.readouterr().err
    assert main([*words, "--force"]) == ExitCode.OK
    assert "left out: 2 documents" in capsys.readouterr().out


def test_data_without_any_label_cannot_be_packed(write_tokens: Callable[..., Path]) -> None:
    dataset = IndexedDataset(write_tokens([[1], [2], [3]]))
    write_bins(dataset, SEQ_LEN)
    with pytest.raises(DataError, match="no document has two tokens"):
        PackedBins(dataset, SEQ_LEN)


def test_document_starts_end_with_the_stream(dataset: IndexedDataset) -> None:
    starts: NDArray[np.int64] = dataset.document_starts(0, dataset.num_documents + 1)
    assert starts.tolist() == [0, *np.cumsum(LENGTHS).tolist()]
    assert dataset.document_starts(3, 5).tolist() == starts[3:5].tolist()
    assert dataset.document_starts(4, 4).tolist() == []
