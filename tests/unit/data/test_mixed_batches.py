"""Batches of several sources: the same with every layout, in proportion to the weights, and over stages without a
gap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.contracts.errors import DataError
from megatrain.contracts.sample_ranges import SampleRanges
from megatrain.data.dataset import open_dataset
from megatrain.data.epochs import check_epochs, source_uses, uses_text
from megatrain.data.mixture import Mixture
from megatrain.data.order import SampleOrder
from megatrain.data.reader import BatchReader
from megatrain.data.training_source import TrainingSource
from tests.helpers.step_plans import step_plan

SEQ_LEN = 8
DOCUMENT = 20
NUM_TOKENS = {"web": 1600, "code": 800, "books": 400}
FIRST_TOKEN = {"web": 0, "code": 2000, "books": 3000}
"""Tokens count up from here, so a token identifies its source and its position."""
STREAM = SampleStream(
    seed=5,
    sources=tuple(StreamSource(name, num_tokens) for name, num_tokens in NUM_TOKENS.items()),
    stages=(MixtureStage(0, (4, 2), SEQ_LEN), MixtureStage(90, (1, 0, 1), SEQ_LEN)),
)


@pytest.fixture
def reader(write_tokens: Callable[..., Path]) -> BatchReader:
    """A reader created by a configuration with the sources in another order."""
    sources = []
    for name in ("books", "web", "code"):
        tokens = range(FIRST_TOKEN[name], FIRST_TOKEN[name] + NUM_TOKENS[name])
        documents = [tokens[first : first + DOCUMENT] for first in range(0, len(tokens), DOCUMENT)]
        dataset, _ = open_dataset(write_tokens(documents, name), 4096)
        order = SampleOrder(dataset.num_tokens, SEQ_LEN, seed=5)
        sources.append(TrainingSource(StreamSource(name, dataset.num_tokens), dataset, order, f"data_source.{name}"))
    return BatchReader(tuple(sources), Mixture(5, (MixtureStage(0, (1, 1, 1), SEQ_LEN),), 3)).following(STREAM)


def first_tokens(reader: BatchReader, cursor: int, size: int, dp_size: int, micro_batch_size: int) -> dict[int, int]:
    """Return the first token of each sample of a step, read by all ranks."""
    found: dict[int, int] = {}
    for dp_rank in range(dp_size):
        for batch in reader.read_step(step_plan(cursor, size, dp_size, micro_batch_size), dp_rank).microbatches:
            found |= zip(batch.sample_B.tolist(), batch.tokens_SB[0].tolist(), strict=True)
    return found


def source_of(token: int) -> str:
    return next(name for name, first in FIRST_TOKEN.items() if token in range(first, first + NUM_TOKENS[name]))


def test_a_mixed_step_is_the_same_at_every_layout(reader: BatchReader) -> None:
    expected = first_tokens(reader, 80, 24, 1, 24)
    assert sorted(expected) == list(range(80, 104))
    for dp_size, micro_batch_size in ((1, 1), (2, 3), (3, 4), (8, 1)):
        assert first_tokens(reader, 80, 24, dp_size, micro_batch_size) == expected


def test_each_source_is_read_in_the_order_that_it_has_alone(reader: BatchReader) -> None:
    found = first_tokens(reader, 0, 240, 1, 1)
    for name, num_tokens in NUM_TOKENS.items():
        own = range(FIRST_TOKEN[name], FIRST_TOKEN[name] + num_tokens)
        starts = [token - own.start for _, token in sorted(found.items()) if token in own]
        order = SampleOrder(num_tokens, SEQ_LEN, seed=5)
        assert starts == order.window_starts(np.arange(len(starts))).tolist()


@pytest.mark.parametrize("skipped", [(), ((84, 100),)], ids=["all", "skipped"])
def test_a_step_names_the_source_of_each_sample(reader: BatchReader, skipped: SampleRanges) -> None:
    masked = replace(reader, has_document_mask=True)
    for dp_rank in range(2):
        batch = masked.read_step(step_plan(80, 24, 2, 3, skipped), dp_rank)
        assert batch.sources is not None
        for number, microbatch in enumerate(batch.microbatches):
            found = [batch.sources.names[source] for source in batch.sources.source_MB[number]]
            firsts = microbatch.tokens_SB[0].tolist()
            assert found == [source_of(first) for first in firsts]
            assert batch.sources.num_labels_MB[number].tolist() == (microbatch.labels_SB >= 0).sum(0).tolist()


def test_a_stage_changes_the_shares_from_its_first_sample_on(reader: BatchReader) -> None:
    samples = first_tokens(reader, 0, 90 + 4096, 1, 90 + 4096)
    books = [sample for sample, token in samples.items() if token >= FIRST_TOKEN["books"]]
    code = [sample for sample, token in samples.items() if FIRST_TOKEN["code"] <= token < FIRST_TOKEN["books"]]
    assert min(books) >= 90 > max(code)
    assert len(books) == 2048


def test_a_source_that_left_needs_no_files(reader: BatchReader) -> None:
    gone = replace(
        reader,
        sources=tuple(source for source in reader.sources if source is not None and source.identity.name != "code"),
    )
    left = gone.following(STREAM)
    assert first_tokens(left, 90, 24, 2, 3) == first_tokens(reader, 90, 24, 2, 3)
    # nor while the samples of its last stage are skipped
    (batch,) = left.read_step(step_plan(60, 24, 1, 24, skipped=((60, 90),)), 0).microbatches
    assert batch.sample_B.tolist() == list(range(90, 114))


def test_epochs_of_a_run_are_counted_and_limited(reader: BatchReader) -> None:
    uses = source_uses(reader, 90 + 4096)
    counts = {use.name: use.num_samples for use in uses}
    assert counts["books"] == 2048
    assert counts["web"] + counts["code"] == 90 + 2048
    assert [use.share for use in uses] == [count / (90 + 4096) for count in counts.values()]
    assert "books 48.92% of the samples, 41.8 epochs" in uses_text(uses)
    check_epochs(uses)

    alone = reader.following(replace(STREAM, stages=(MixtureStage(0, (0, 0, 1), SEQ_LEN),)))
    # 400 tokens are 49 windows of 8 after the offset
    limited = replace(
        alone, sources=tuple(None if source is None else replace(source, max_epochs=1.0) for source in alone.sources)
    )
    check_epochs(source_uses(limited, 49))
    with pytest.raises(
        DataError, match=r"^data_source.books.max_epochs=1: .* read books 1\.02 times; lower its weight"
    ):
        check_epochs(source_uses(limited, 50))
    check_epochs(source_uses(limited, 50, cursor=50))  # No further sample of it is read.
    check_epochs(source_uses(limited, 53, skipped=((10, 14), (90, 99))))
    with pytest.raises(DataError, match=r"read books 1\.02 times"):
        check_epochs(source_uses(limited, 53, skipped=((10, 12), (52, 60))))


def test_a_run_of_no_samples_uses_nothing(reader: BatchReader) -> None:
    assert "web 0.00% of the samples, 0 epochs" in uses_text(source_uses(reader, 0))


def test_sources_of_one_name_are_distinguished_by_content(write_tokens: Callable[..., Path]) -> None:
    """A source that was removed keeps its name, which another source may have now."""
    left, now = StreamSource("web", 800, "a" * 32), StreamSource("web", 400, "b" * 32)
    dataset, _ = open_dataset(write_tokens([range(400)], "now"), 4096)
    source = TrainingSource(now, dataset, SampleOrder(400, SEQ_LEN, seed=5), max_epochs=4.0)
    stream = SampleStream(5, (left, now), (MixtureStage(0, (1,), SEQ_LEN), MixtureStage(5000, (0, 1), SEQ_LEN)))
    reader = BatchReader((source,), Mixture(5, (MixtureStage(0, (1,), SEQ_LEN),), 1)).following(stream)
    assert reader.sources == (None, source)
    (use,) = source_uses(reader, 5049)
    assert (use.num_samples, use.epochs) == (49, 1.0)
