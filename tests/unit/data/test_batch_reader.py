"""Micro-batches: their content, how samples are assigned, and masks at document ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.contracts.step_plan import NO_SAMPLE, Dealing, StepPlan
from megatrain.data.dataset import open_dataset
from megatrain.data.indexed import IndexedDataset
from megatrain.data.microbatch import TokenWindow, assemble
from megatrain.data.order import SampleOrder
from megatrain.data.reader import BatchReader
from tests.helpers.one_source import reader_of_one
from tests.helpers.step_plans import step_plan

SEQ_LEN = 8


@pytest.fixture
def dataset(write_tokens: Callable[..., Path]) -> IndexedDataset:
    """Documents of 1 to 20 tokens, each token its own position in the stream."""
    lengths = np.random.default_rng(3).integers(1, 21, 60)
    ends = np.cumsum(lengths)
    prefix = write_tokens([range(end - length, end) for length, end in zip(lengths, ends, strict=True)])
    return open_dataset(prefix, 4096)[0]


def reader(dataset: IndexedDataset, has_document_mask: bool = False) -> BatchReader:
    return reader_of_one(dataset, SampleOrder(dataset.num_tokens, SEQ_LEN, seed=1), has_document_mask)


def test_batches_are_sequence_first_with_next_tokens_as_labels(dataset: IndexedDataset) -> None:
    step = reader(dataset).read_step(step_plan(5, 12, num_replicas=2, micro_batch_size=3), 1)
    assert len(step.microbatches) == 2
    assert step.num_label_tokens == 2 * 3 * SEQ_LEN
    for batch in step.microbatches:
        assert batch.tokens_SB.shape == batch.labels_SB.shape == (SEQ_LEN, 3)
        assert batch.tokens_SB.dtype == batch.labels_SB.dtype == batch.sample_B.dtype == np.int64
        assert batch.tokens_SB.flags.c_contiguous
        assert batch.document_SB is None
        assert np.array_equal(batch.labels_SB, batch.tokens_SB + 1)  # each token is its own position
        starts = SampleOrder(dataset.num_tokens, SEQ_LEN, seed=1).window_starts(batch.sample_B)
        assert batch.tokens_SB[0].tolist() == starts.tolist()


def test_samples_are_assigned_by_the_stated_rule(dataset: IndexedDataset) -> None:
    for dp_rank in range(3):
        step = reader(dataset).read_step(step_plan(100, 24, num_replicas=3, micro_batch_size=2), dp_rank)
        for m, batch in enumerate(step.microbatches):
            assert batch.sample_B.tolist() == [100 + (m * 3 + dp_rank) * 2 + j for j in range(2)]


@pytest.mark.parametrize("has_document_mask", [False, True])
def test_a_step_holds_the_same_samples_at_every_layout(dataset: IndexedDataset, has_document_mask: bool) -> None:
    def by_sample(dp_size: int, micro_batch_size: int) -> tuple[dict[int, tuple[object, ...]], int]:
        found: dict[int, tuple[object, ...]] = {}
        num_label_tokens = 0
        for dp_rank in range(dp_size):
            step = reader(dataset, has_document_mask).read_step(step_plan(240, 24, dp_size, micro_batch_size), dp_rank)
            num_label_tokens += step.num_label_tokens
            for batch in step.microbatches:
                for j, sample in enumerate(batch.sample_B.tolist()):
                    if sample == NO_SAMPLE:
                        continue
                    columns = (batch.tokens_SB, batch.labels_SB, batch.document_SB)
                    found[sample] = tuple(None if column is None else column[:, j].tolist() for column in columns)
        return found, num_label_tokens

    expected = by_sample(1, 24)
    assert sorted(expected[0]) == list(range(240, 264))
    for dp_size, micro_batch_size in ((1, 1), (2, 3), (3, 4), (8, 1), (4, 6), (7, 1), (7, 2), (5, 6)):
        assert by_sample(dp_size, micro_batch_size) == expected


def test_document_mask_follows_the_bounds_of_documents(dataset: IndexedDataset) -> None:
    owner = np.repeat(np.arange(dataset.num_documents), dataset.sequence_lengths)
    cursor = 0
    for _ in range(10):
        step = reader(dataset, has_document_mask=True).read_step(step_plan(cursor, 4, micro_batch_size=4), 0)
        cursor += 4
        (batch,) = step.microbatches
        assert batch.document_SB is not None
        for j in range(4):
            positions = batch.tokens_SB[:, j]  # each token is its own position
            assert np.array_equal(batch.document_SB[:, j], owner[positions] - owner[positions[0]])
            is_last = owner[positions] != owner[positions + 1]
            assert np.array_equal(batch.labels_SB[:, j], np.where(is_last, IGNORED_LABEL, positions + 1))
        assert step.num_label_tokens == int((batch.labels_SB != IGNORED_LABEL).sum()) < 4 * SEQ_LEN


def test_counts_of_a_microbatch_are_those_of_its_tensors(write_tokens: Callable[..., Path]) -> None:
    """Documents with no and with few tokens; windows with all, some and no labels."""
    lengths = np.random.default_rng(4).integers(0, 7, 40)
    dataset, _ = open_dataset(write_tokens([[1] * int(length) for length in lengths]), 4096)
    for start in range(dataset.num_tokens - SEQ_LEN):
        for has_document_mask in (False, True):
            samples = [[TokenWindow(dataset, start, count)] for count in (SEQ_LEN, 3, 0)]
            samples.append([TokenWindow(dataset, start, 2), TokenWindow(dataset, start + 4, 3)])
            batch = assemble(samples, np.arange(4), SEQ_LEN, has_document_mask)
            is_label_SB = batch.labels_SB != IGNORED_LABEL
            assert batch.num_labels_B.tolist() == is_label_SB.sum(0).tolist()
            assert batch.num_label_tokens == int(is_label_SB.sum())
            if batch.document_SB is None:
                assert (batch.squared_lengths, batch.num_documents) == (4 * SEQ_LEN**2, 4)
            else:
                columns = batch.document_SB.T
                assert batch.squared_lengths == sum(int((np.bincount(column) ** 2).sum()) for column in columns)
                real = [column[:size].tolist() for column, size in zip(columns, (SEQ_LEN, 3, 0, 5), strict=True)]
                assert batch.num_documents == sum(len(set(numbers)) for numbers in real)


def test_a_microbatch_keeps_its_own_sample_numbers(dataset: IndexedDataset) -> None:
    samples_B = np.arange(3)
    samples = [[TokenWindow(dataset, start, SEQ_LEN)] for start in (0, 8, 16)]
    batch = assemble(samples, samples_B, SEQ_LEN, has_document_mask=False)
    samples_B += 100
    assert batch.sample_B.tolist() == [0, 1, 2]


@pytest.mark.parametrize("has_document_mask", [False, True])
def test_empty_slots_have_the_shape_of_others_and_no_label(dataset: IndexedDataset, has_document_mask: bool) -> None:
    plan = StepPlan(240, 6, 2, Dealing(3, 2, least_slots=4))
    for replica, num_own in ((0, 2), (1, 1)):
        step = reader(dataset, has_document_mask).read_step(plan, replica)
        own, empty = step.microbatches[:num_own], step.microbatches[num_own:]
        assert len(own + empty) == 4
        assert step.num_label_tokens == sum(batch.num_label_tokens for batch in own) > 0
        for batch in empty:
            assert batch.tokens_SB.shape == batch.labels_SB.shape == own[0].tokens_SB.shape
            assert (batch.document_SB is None) == (own[0].document_SB is None)
            assert not batch.tokens_SB.any()
            assert (batch.labels_SB == IGNORED_LABEL).all()
            assert batch.num_labels_B.tolist() == [0, 0]
            assert batch.sample_B.tolist() == [NO_SAMPLE, NO_SAMPLE]
