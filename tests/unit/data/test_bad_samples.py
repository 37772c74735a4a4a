"""Samples that cannot be used: refused with their place, or replaced by samples without labels."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.contracts.errors import DataError
from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.data.bad_tokens import BadTokensError
from megatrain.data.bins import BINS_HEADER, PackedBins, bins_path, write_bins
from megatrain.data.block_sums import BLOCK_BYTES
from megatrain.data.dataset import open_dataset
from megatrain.data.indexed import IndexedDataset, data_path
from megatrain.data.masked_samples import without_samples
from megatrain.data.order import PackedOrder, SampleOrder
from megatrain.data.reader import BatchReader
from megatrain.data.step_batch import StepBatch
from megatrain.data.verification import verify_data
from tests.helpers.bad_disk import break_disk
from tests.helpers.one_source import reader_of_one
from tests.helpers.step_plans import step_plan

SEQ_LEN = 8
VOCAB_SIZE = 4096
BAD_POSITION = 101
SIZE = 60
"""Samples of a step: most of an epoch."""

Patch = pytest.MonkeyPatch


@pytest.fixture
def prefix(write_tokens: Callable[..., Path]) -> Path:
    """Documents of up to 20 tokens, each token its own position in the stream. An empty document precedes the bad
    token."""
    ends = np.sort([*np.random.default_rng(3).integers(1, 21, 60).cumsum(), BAD_POSITION, BAD_POSITION])
    return write_tokens([range(end - length, end) for length, end in zip(np.diff(ends, prepend=0), ends, strict=True)])


def change_token(prefix: Path, patch: Patch) -> None:
    with data_path(prefix).open("r+b") as file:
        file.seek(2 * BAD_POSITION)
        file.write(b"\xff\xff")


def cut_off(prefix: Path, patch: Patch) -> None:
    os.truncate(data_path(prefix), 2 * BAD_POSITION)


def break_page(prefix: Path, patch: Patch) -> None:
    break_disk(patch, 2 * BAD_POSITION, 2 * BAD_POSITION + 2)


FAULTS: dict[str, tuple[Callable[[Path, Patch], None], str]] = {
    "token id outside the vocabulary": (
        change_token,
        "token id 65535 at position 101 is outside model.vocab_size=4096",
    ),
    "file cut off after the start": (cut_off, "the file ends before this byte; it had "),
    "unreadable page": (break_page, "cannot be read: Input/output error; copy the file again"),
}


def reader(dataset: IndexedDataset, has_mask: bool, *, replaces: bool = True) -> BatchReader:
    of_one = reader_of_one(dataset, SampleOrder(dataset.num_tokens, SEQ_LEN, seed=1), has_mask)
    return replace(of_one, replaces_bad_samples=replaces)


def read(reader: BatchReader, dp_size: int = 1, micro_batch_size: int = 1, size: int = SIZE) -> list[StepBatch]:
    return [reader.read_step(step_plan(0, size, dp_size, micro_batch_size), rank) for rank in range(dp_size)]


def by_sample(batches: list[StepBatch]) -> dict[int, tuple[Any, ...]]:
    """Return tokens, labels, documents and number of labels of each sample."""
    return {
        number: tuple(
            None if part is None else part[..., place].tolist()
            for part in (micro.tokens_SB, micro.labels_SB, micro.document_SB, micro.num_labels_B)
        )
        for batch in batches
        for micro in batch.microbatches
        for place, number in enumerate(micro.sample_B.tolist())
    }


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("has_mask", [False, True])
def test_replaced_sample_has_no_labels_others_are_the_same(
    fault: str, has_mask: bool, prefix: Path, monkeypatch: Patch
) -> None:
    dataset, _ = open_dataset(prefix, VOCAB_SIZE)
    clean = by_sample(read(reader(dataset, has_mask)))
    # Each token is its own position; a sample has one token more than labels.
    is_bad: Callable[[int], bool] = lambda start: start <= BAD_POSITION <= start + SEQ_LEN  # noqa: E731
    if fault == "file cut off after the start":
        is_bad = lambda start: start + SEQ_LEN >= BAD_POSITION  # noqa: E731
    expected = {number for number, (tokens, *_) in clean.items() if is_bad(tokens[0])}
    assert 0 < len(expected) < len(clean)
    FAULTS[fault][0](prefix, monkeypatch)

    for dp_size, micro_batch_size in ((1, 1), (3, 4), (5, 2)):
        batches = read(reader(dataset, has_mask), dp_size, micro_batch_size)
        found = by_sample(batches)
        empty = ([0] * SEQ_LEN, [IGNORED_LABEL] * SEQ_LEN, [0] * SEQ_LEN if has_mask else None, 0)
        assert found == {number: empty if number in expected else clean[number] for number in clean}
        bad = [sample for batch in batches for sample in batch.bad_samples]
        assert {sample.number for sample in bad} == expected
        assert len(bad) == len(expected)
        for batch in batches:
            labels = [micro.labels_SB for micro in batch.microbatches]
            assert batch.num_label_tokens == sum(int((part != IGNORED_LABEL).sum()) for part in labels)


@pytest.mark.parametrize("fault", FAULTS)
def test_refused_sample_names_file_byte_and_document(fault: str, prefix: Path, monkeypatch: Patch) -> None:
    dataset, _ = open_dataset(prefix, VOCAB_SIZE)
    break_it, text = FAULTS[fault]
    break_it(prefix, monkeypatch)
    with pytest.raises(DataError) as caught:
        read(reader(dataset, has_mask=False, replaces=False))
    starts = dataset.document_starts(0, dataset.num_documents)
    assert isinstance(caught.value, BadTokensError)
    address = caught.value.tokens
    assert address.file == str(data_path(prefix))
    assert address.document == int(np.searchsorted(starts, address.offset // 2, side="right")) - 1
    if fault == "file cut off after the start":
        assert address.offset >= 2 * BAD_POSITION
    else:
        assert address.offset == 2 * BAD_POSITION
    assert str(caught.value).startswith(
        f"{address.file} at byte {address.offset} (document {address.document}): {text}"
    )
    # A process that reads for others sends the error.
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_packed_sample_with_damaged_bins_is_replaced(write_tokens: Callable[..., Path]) -> None:
    lengths = np.random.default_rng(5).integers(1, 21, 900)
    prefix = write_tokens([[1] * int(length) for length in lengths])
    dataset = IndexedDataset(prefix, VOCAB_SIZE)
    write_bins(dataset, SEQ_LEN)
    size = PackedBins(dataset, SEQ_LEN).num_bins

    def read_packed() -> list[StepBatch]:
        of_one = reader_of_one(dataset, SampleOrder(dataset.num_tokens, SEQ_LEN, seed=1), has_document_mask=True)
        source = of_one.sources[0]
        assert source is not None
        packed = replace(source, order=PackedOrder.of(dataset, SEQ_LEN, seed=3))
        return read(replace(of_one, sources=(packed,), replaces_bad_samples=True), size=size)

    clean = by_sample(read_packed())
    content = bytearray(bins_path(prefix, SEQ_LEN).read_bytes())
    content[BINS_HEADER.size + BLOCK_BYTES - 1] ^= 1
    bins_path(prefix, SEQ_LEN).write_bytes(content)
    (batch,) = read_packed()
    found, bad = by_sample([batch]), {sample.number: sample.reason for sample in batch.bad_samples}
    assert 0 < len(bad) < size
    for number, sample in found.items():
        assert sample[3] == 0 if number in bad else sample == clean[number]
    address = f"{bins_path(prefix, SEQ_LEN)} at byte {BINS_HEADER.size}: "
    assert all(reason is not None and reason.startswith(address) for reason in bad.values())


@pytest.mark.parametrize("has_mask", [False, True])
def test_removal_from_a_batch_equals_replacement_in_reading(has_mask: bool, prefix: Path, monkeypatch: Patch) -> None:
    dataset, _ = open_dataset(prefix, VOCAB_SIZE)
    (clean,) = read(reader(dataset, has_mask), micro_batch_size=4)
    break_page(prefix, monkeypatch)
    (expected,) = read(reader(dataset, has_mask), micro_batch_size=4)
    numbers = [sample.number for sample in expected.bad_samples]
    found = without_samples(clean, [*numbers, SIZE + 7])

    assert by_sample([found]) == by_sample([expected])
    assert [(sample.number, sample.source) for sample in found.bad_samples] == [(number, 0) for number in numbers]
    for name in ("num_label_tokens", "squared_lengths", "num_documents"):
        assert getattr(found, name) == getattr(expected, name)
    assert without_samples(expected, numbers) is expected


def test_start_accepts_damage_and_refuses_another_vocabulary(prefix: Path, monkeypatch: Patch) -> None:
    change_token(prefix, monkeypatch)
    assert open_dataset(prefix, VOCAB_SIZE, replaces_bad_samples=True)[0].num_tokens > 0
    with pytest.raises(DataError, match="token id 65535"):
        open_dataset(prefix, VOCAB_SIZE)
    with pytest.raises(DataError, match="is outside"):
        open_dataset(prefix, 100, replaces_bad_samples=True)


def test_verification_names_the_first_unreadable_byte(prefix: Path, monkeypatch: Patch) -> None:
    break_page(prefix, monkeypatch)
    (pair,) = verify_data(prefix)
    (problem,) = pair.problems
    assert (problem.file, problem.offset) == (str(data_path(prefix)), 2 * BAD_POSITION)
    assert "Input/output error" in problem.text
