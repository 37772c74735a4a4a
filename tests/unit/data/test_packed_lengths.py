"""Packed samples whose length changes: each label of an epoch once, first from the bins of the length before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import DataError
from megatrain.data.bins import write_bins
from megatrain.data.indexed import IndexedDataset
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.order import PackedOrder
from megatrain.data.stretches import LengthChange
from megatrain.training.training_data import open_reader
from tests.helpers.training_case import make_config

SEQ_LENS = (4, 8, 16)
DOCUMENTS = np.minimum(40, np.random.default_rng(3).lognormal(1.8, 1.0, 60).astype(np.int64) + 1)
NUM_SAMPLES = 250


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    prefix = tmp_path_factory.mktemp("packed") / "train"
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for length in DOCUMENTS:
            writer.add_document(np.arange(length))
    found = IndexedDataset(prefix)
    for seq_len in SEQ_LENS:
        write_bins(found, seq_len)
    return found


def labels_of(order: PackedOrder, indices: list[int]) -> list[list[int]]:
    """Return the position of the token before each label, by sample."""
    starts, labels, bounds = (array.tolist() for array in order.pieces(np.array(indices, dtype=np.int64)))
    pieces = [list(range(start, start + count)) for start, count in zip(starts, labels, strict=True)]
    return [list(chain.from_iterable(pieces[first:end])) for first, end in pairwise(bounds)]


def by_hand(dataset: IndexedDataset, seed: int, changes: list[LengthChange]) -> list[list[int]]:
    """Return the labels of samples: those of an epoch fill the bins of the length with which it began."""
    found: list[list[int]] = []
    left: list[int] = []
    epoch = 0
    for number in range(NUM_SAMPLES):
        seq_len = max(change for change in changes if change.first_index <= number).seq_len
        if not left:
            order = PackedOrder.of(dataset, seq_len, seed)
            first = epoch * order.samples_per_epoch
            for bin_ in labels_of(order, list(range(first, first + order.samples_per_epoch))):
                left += bin_ + [-1] * (seq_len - len(bin_))
            epoch += 1
        found.append([label for label in left[:seq_len] if label >= 0])
        left = left[seq_len:]
    return found


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 100),
    firsts=st.lists(st.integers(1, NUM_SAMPLES), min_size=1, max_size=3, unique=True).map(sorted),
    lengths=st.lists(st.sampled_from(SEQ_LENS), min_size=4, max_size=4),
)
def test_changes_of_length_read_each_label_of_an_epoch_once(
    dataset: IndexedDataset, seed: int, firsts: list[int], lengths: list[int]
) -> None:
    changes = [LengthChange(first, length) for first, length in zip([0, *firsts], lengths, strict=False)]
    order = PackedOrder.of(dataset, lengths[0], seed).with_lengths(changes)
    expected = by_hand(dataset, seed, changes)
    indices = list(range(NUM_SAMPLES))
    assert labels_of(order, indices) == expected
    # the same for any part of them, in any order
    chosen = np.random.default_rng(seed).permutation(NUM_SAMPLES)[:50].tolist()
    assert labels_of(order, chosen) == [expected[index] for index in chosen]
    starts, labels, _ = order.pieces(np.array(indices))
    owner = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS)
    assert (owner[starts] == owner[starts + labels]).all(), "a piece lies in one document"


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
