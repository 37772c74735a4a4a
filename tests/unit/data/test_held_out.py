"""Evaluation: every token is predicted once, with every layout, with at least one micro-batch on each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.checkpoint_format.sample_stream import StreamSource
from megatrain.contracts.errors import DataError
from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.data.held_out import WindowOrder, evaluation_batches, held_out_reader, num_windows
from megatrain.data.indexed import IndexedDataset
from megatrain.data.microbatch import MicroBatch
from megatrain.data.training_source import TrainingSource


def evaluated(
    dataset: IndexedDataset,
    seq_len: int,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_samples: int = 0,
    has_document_mask: bool = False,
) -> list[MicroBatch]:
    """Return the micro-batches of a rank, of the first windows of a text (0: all)."""
    available = num_windows(dataset, seq_len)
    order = WindowOrder(0, available, num_tokens=dataset.num_tokens)
    source = TrainingSource(StreamSource("text", dataset.num_tokens), dataset, order)
    reader = held_out_reader(source, seq_len, has_document_mask)
    number = min(num_samples or available, available)
    groups = list(evaluation_batches(reader, number, micro_batch_size, dp_rank, dp_size, at_once=2))
    assert [len(group.microbatches) for group in groups[:-1]] == [2] * (len(groups) - 1)
    return [micro for group in groups for micro in group.microbatches]


def predicted(
    dataset: IndexedDataset, seq_len: int, micro_batch_size: int, dp_size: int, **options: object
) -> list[int]:
    """Return the labels with a loss on all ranks, after checking each rank's tensors."""
    labels: list[int] = []
    counts = []
    for dp_rank in range(dp_size):
        batches = evaluated(dataset, seq_len, micro_batch_size, dp_rank, dp_size, **options)
        counts.append(len(batches))
        for batch in batches:
            assert batch.tokens_SB.shape == batch.labels_SB.shape == (seq_len, micro_batch_size)
            has_loss = batch.labels_SB != IGNORED_LABEL
            assert (batch.labels_SB[has_loss] == batch.tokens_SB[has_loss] + 1).all()
            labels += batch.labels_SB[has_loss].tolist()
    # No rank is without one, because all ranks gather the parameters.
    assert min(counts) >= max(1, max(counts) - 1)
    assert counts == sorted(counts, reverse=True)
    return sorted(labels)


@pytest.mark.parametrize(("micro_batch_size", "dp_size"), [(1, 1), (3, 1), (2, 4), (5, 3)])
def test_every_token_is_predicted_once(write_tokens: Callable[..., Path], micro_batch_size: int, dp_size: int) -> None:
    for num_tokens in (2, 7, 16, 17, 18, 100, 129):
        dataset = IndexedDataset(write_tokens([range(num_tokens)], f"{num_tokens}-tokens"))
        assert predicted(dataset, 16, micro_batch_size, dp_size) == list(range(1, num_tokens))
        if num_tokens == 100:
            assert predicted(dataset, 16, micro_batch_size, dp_size, num_samples=3) == list(range(1, 49))
            assert predicted(dataset, 16, micro_batch_size, dp_size, num_samples=1000) == list(range(1, 100))


def test_no_more_microbatches_than_there_are_windows(write_tokens: Callable[..., Path]) -> None:
    """17 tokens are one window of 16 labels."""
    for num_tokens, num_samples, expected in [
        (17, 0, 1), (18, 0, 2), (33, 0, 2), (17, 1000, 1), (100, 1000, 7), (100, 7, 7), (100, 3, 3),
    ]:  # fmt: skip
        dataset = IndexedDataset(write_tokens([range(num_tokens)], f"{num_tokens}-{num_samples}"))
        found = evaluated(dataset, 16, 1, num_samples=num_samples)
        assert len(found) == expected, (num_tokens, num_samples)


def test_document_mask_leaves_out_first_tokens_of_documents(write_tokens: Callable[..., Path]) -> None:
    dataset = IndexedDataset(write_tokens([range(10), range(10, 33), range(33, 40)]))
    assert predicted(dataset, 16, 2, 2, has_document_mask=True) == [n for n in range(1, 40) if n not in (10, 33)]
    first, *_ = evaluated(dataset, 16, 1, has_document_mask=True)
    assert first.document_SB is not None
    assert first.document_SB[:, 0].tolist() == [0] * 10 + [1] * 6


def test_a_single_token_cannot_be_evaluated(write_tokens: Callable[..., Path]) -> None:
    dataset = IndexedDataset(write_tokens([[1]]))
    with pytest.raises(DataError, match="tokens: holds 1 token, and evaluation needs 2"):
        num_windows(dataset, 16)
