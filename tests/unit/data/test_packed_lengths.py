"""Packed samples whose length changes: each label of an epoch once, first from the bins of the length before; and the
parts of an epoch, which consist of blocks of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import DataError
from megatrain.data import bins, packing
from megatrain.data.bins import BINS_HEADER, PackedBins, bins_path, write_bins
from megatrain.data.indexed import IndexedDataset
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.order import PackedOrder
from megatrain.data.parts import PartSizes
from megatrain.data.stretches import LengthChange
from megatrain.data.verification import verify_data
from megatrain.training.training_data import open_reader
from tests.helpers.training_case import make_config

SEQ_LENS = (4, 8, 16)
BLOCK_DOCUMENTS = 8
PART_TOKENS = (0, 120, 250)
DOCUMENTS = np.minimum(40, np.random.default_rng(3).lognormal(1.8, 1.0, 60).astype(np.int64) + 1)
NUM_SAMPLES = 250


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexedDataset]:
    """Documents in packed samples of each length, which are packed in small blocks."""
    prefix = tmp_path_factory.mktemp("packed") / "train"
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for length in DOCUMENTS:
            writer.add_document(np.arange(length))
    found = IndexedDataset(prefix)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(bins, "BLOCK_DOCUMENTS", BLOCK_DOCUMENTS)
        patches.setattr(packing, "BLOCK_DOCUMENTS", BLOCK_DOCUMENTS)
        for seq_len in SEQ_LENS:
            write_bins(found, seq_len)
        yield found


def labels_of(order: PackedOrder, indices: list[int]) -> list[list[int]]:
    """Return the position of the token before each label, by sample."""
    starts, labels, bounds = (array.tolist() for array in order.pieces(np.array(indices, dtype=np.int64)))
    pieces = [list(range(start, start + count)) for start, count in zip(starts, labels, strict=True)]
    return [list(chain.from_iterable(pieces[first:end])) for first, end in pairwise(bounds)]


def parts_of(order: PackedOrder, epoch: int) -> list[list[list[int]]]:
    """Return the samples of each part of an epoch of one length, by the documents that they hold.

    A part has as many blocks as hold `part_tokens` on average; the last has the rest, too.
    """
    block_of = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS) // BLOCK_DOCUMENTS
    num_blocks = -(-len(DOCUMENTS) // BLOCK_DOCUMENTS)
    part_tokens = order.sizes.part_tokens or int(DOCUMENTS.sum())
    per_part = -(-part_tokens * num_blocks // int(DOCUMENTS.sum()))
    first, parts = epoch * order.samples_per_epoch, list[list[list[int]]]()
    blocks: set[int] = set()
    for sample in labels_of(order, list(range(first, first + order.samples_per_epoch))):
        (block,) = {int(block_of[label]) for label in sample}
        if not parts or (block not in blocks and len(blocks) == per_part and len(parts) < num_blocks // per_part):
            parts.append([])
            blocks = set()
        blocks.add(block)
        parts[-1].append(sample)
    return parts


def by_hand(dataset: IndexedDataset, seed: int, changes: list[LengthChange], sizes: PartSizes) -> list[list[int]]:
    """Return the labels of samples: those of a part fill the bins of the length with which it began."""
    found: list[list[int]] = []
    left: list[int] = []
    parts: dict[int, list[list[list[int]]]] = {seq_len: [] for seq_len in SEQ_LENS}
    part = 0
    for number in range(NUM_SAMPLES):
        seq_len = max(change for change in changes if change.first_index <= number).seq_len
        if not left:
            order = PackedOrder.of(dataset, seq_len, seed, sizes)
            while len(parts[seq_len]) <= part:
                num_parts = len(parts_of(order, 0))
                parts[seq_len] += parts_of(order, len(parts[seq_len]) // num_parts)
            for bin_ in parts[seq_len][part]:
                left += bin_ + [-1] * (seq_len - len(bin_))
            part += 1
        found.append([label for label in left[:seq_len] if label >= 0])
        left = left[seq_len:]
    return found


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 100),
    firsts=st.lists(st.integers(1, NUM_SAMPLES), min_size=1, max_size=3, unique=True).map(sorted),
    lengths=st.lists(st.sampled_from(SEQ_LENS), min_size=4, max_size=4),
    part_tokens=st.sampled_from(PART_TOKENS),
)
def test_changes_of_length_read_each_label_of_an_epoch_once(
    dataset: IndexedDataset, seed: int, firsts: list[int], lengths: list[int], part_tokens: int
) -> None:
    sizes = PartSizes(part_tokens=part_tokens)
    changes = [LengthChange(first, length) for first, length in zip([0, *firsts], lengths, strict=False)]
    order = PackedOrder.of(dataset, lengths[0], seed, sizes).with_lengths(changes)
    expected = by_hand(dataset, seed, changes, sizes)
    indices = list(range(NUM_SAMPLES))
    assert labels_of(order, indices) == expected
    # the same for any part of them, in any order
    chosen = np.random.default_rng(seed).permutation(NUM_SAMPLES)[:50].tolist()
    assert labels_of(order, chosen) == [expected[index] for index in chosen]
    starts, labels, _ = order.pieces(np.array(indices))
    owner = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS)
    assert (owner[starts] == owner[starts + labels]).all(), "a piece lies in one document"


@pytest.mark.parametrize("part_tokens", PART_TOKENS)
def test_parts_hold_the_same_documents_in_any_length(dataset: IndexedDataset, part_tokens: int) -> None:
    """So a change of the length can begin at any part."""
    orders = [PackedOrder.of(dataset, seq_len, 7, PartSizes(part_tokens=part_tokens)) for seq_len in SEQ_LENS]
    by_length = [
        [set(chain.from_iterable(part)) for part in parts_of(order, epoch)] for order in orders for epoch in (0, 1)
    ]
    assert all(found == by_length[0] for found in by_length)
    num_parts = {0: 1, 120: 4, 250: 2}[part_tokens]
    assert len(by_length[0]) == num_parts
    (first, *_), all_labels = by_length[0], set().union(*by_length[0])
    assert len(all_labels) == sum(map(len, by_length[0])) == int(DOCUMENTS.sum() - len(DOCUMENTS))
    # a part is from all over the file
    assert num_parts == 1 or max(first) - min(first) > len(first) + len(DOCUMENTS)


def test_a_damaged_division_into_blocks_is_refused(write_tokens: Callable[..., Path]) -> None:
    prefix = write_tokens([list(range(9))] * 40, "train", 90)
    dataset = IndexedDataset(prefix)
    write_bins(dataset, 4)
    whole = PackedBins(dataset, 4)
    place = BINS_HEADER.size + whole.pieces.nbytes + whole.bounds.nbytes
    path = bins_path(prefix, 4)
    content = bytearray(path.read_bytes())
    content[place + 8] ^= 1
    path.write_bytes(content)
    (problem,) = verify_data(dataset.prefix)[0].problems
    assert problem.offset == place + 8
    with pytest.raises(DataError, match=r"train.bins-4 at byte \d+: the 4096 bytes from here on differ"):
        PackedOrder.of(dataset, 4, 7, PartSizes(part_tokens=100))


def test_a_later_length_needs_its_packed_samples(write_tokens: Callable[..., Path]) -> None:
    prefix = write_tokens([list(range(9))] * 40, "train", 90)
    write_bins(IndexedDataset(prefix), 4)
    data = {"train": str(prefix), "has_document_mask": True, "packing": "best_fit", "seq_len": 4}
    config = make_config({"data": data, "data_stage": {"after_tokens": 64, "seq_len": 16}})
    with pytest.raises(DataError, match=r"train.bins-16: does not exist; make it with `megatrain data pack .* 16`"):
        open_reader(config)
    write_bins(IndexedDataset(prefix), 16)
    reader = open_reader(config)
    (source,) = reader.sources
    assert source is not None
    assert source.order.lengths(np.array([0, 15, 16, 17])).tolist() == [4, 4, 16, 16]
