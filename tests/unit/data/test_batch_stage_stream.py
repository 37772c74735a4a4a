"""The samples of a run with several stages: the same for any layouts, stops and later plans, each of an epoch once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.checkpoint.continued_stream import continued_stream
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.config.batch import BatchConfig, BatchSchedule, BatchStage
from megatrain.data.mixture import Mixture
from megatrain.data.order import SampleOrder
from tests.helpers.step_plans import step_plan

SEQ_LEN = 4
SOURCES = {"web": 403, "code": 230, "books": 129}
REPLICAS = (8, 7, 3, 8)
Place = tuple[int, int, int]
"""Source, epoch of the source, first token of a window."""


def new_stream(seed: int, *stages: MixtureStage) -> SampleStream:
    sources = tuple(StreamSource(name, num_tokens, name) for name, num_tokens in SOURCES.items())
    return SampleStream(seed, sources, stages)


def places(stream: SampleStream, samples: list[int]) -> list[Place]:
    """Return the place of each sample."""
    sources, numbers = Mixture.of(stream).places(np.array(samples, dtype=np.int64))
    epochs, starts = np.empty_like(numbers), np.empty_like(numbers)
    for source, identity in enumerate(stream.sources):
        own = sources == source
        order = SampleOrder(identity.num_tokens, SEQ_LEN, stream.seed)
        epochs[own], starts[own] = numbers[own] // order.samples_per_epoch, order.window_starts(numbers[own])
    return list(zip(sources.tolist(), epochs.tolist(), starts.tolist(), strict=True))


def steps_of(batches: BatchSchedule, cursor: int, num_steps: int, num_replicas: int) -> tuple[list[list[int]], int]:
    """Return the samples that the replicas read together in each step, by micro-batch, and the next cursor."""
    steps = []
    for begin, size in islice(batches.steps_from(cursor, ()), num_steps):
        plan = step_plan(begin, size, num_replicas)
        slots = {
            slot * num_replicas + replica: sample
            for replica in range(num_replicas)
            for slot, samples in enumerate(plan.slots(replica))
            for sample in samples
        }
        steps.append([sample for _, sample in sorted(slots.items())])
    return steps, batches.cursor_after(cursor, num_steps, ())


WEIGHTS = st.tuples(*[st.integers(1, 6)] * len(SOURCES))


@settings(derandomize=True, max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    weights=st.lists(WEIGHTS, min_size=3, max_size=3),
    begins=st.lists(st.integers(1, 400), min_size=2, max_size=2, unique=True).map(sorted),
    batches=st.lists(st.integers(1, 30), min_size=3, max_size=3),
    stops=st.lists(st.integers(0, 8), min_size=4, max_size=4),
)
def test_stream_of_two_stage_changes_is_the_same_for_all_layouts(
    seed: int, weights: list[tuple[int, ...]], begins: list[int], batches: list[int], stops: list[int]
) -> None:
    """Replicas change from 8 to 7, 3 and 8, each time with a stream that continues the recorded one."""
    stages = [MixtureStage(first, weight, SEQ_LEN) for first, weight in zip((0, *begins), weights, strict=True)]
    planned = new_stream(seed, *stages)
    schedule = BatchSchedule(
        BatchConfig(global_batch_size=batches[0]),
        tuple(BatchStage(first, size) for first, size in zip(begins, batches[1:], strict=True)),
    )
    # The oracle: one list of all samples, divided into consecutive steps.
    expected: list[range] = []
    first = 0
    for _ in range(sum(stops)):
        size = batches[sum(first >= begin for begin in begins)]
        expected.append(range(first, first + size))
        first += size
    everything = places(planned, list(range(first)))

    found: list[Place] = []
    lengths: list[int] = []
    cursor, stream = 0, planned
    for num_replicas, num_steps in zip(REPLICAS, stops, strict=True):
        continued = continued_stream(stream, planned, cursor)
        assert not continued.problem
        stream = continued.stream
        steps, cursor = steps_of(schedule, cursor, num_steps, num_replicas)
        lengths += map(len, steps)
        found += places(stream, list(chain.from_iterable(steps)))
    assert lengths == list(map(len, expected))
    assert found == everything
    assert cursor == first

    # Each window of an epoch once: the epochs of a source are filled one after another.
    counts = Counter(everything)
    assert set(counts.values()) <= {1}
    for source, num_tokens in enumerate(SOURCES.values()):
        epochs = Counter(epoch for number, epoch, _ in counts if number == source)
        full = SampleOrder(num_tokens, SEQ_LEN, seed).samples_per_epoch
        assert all(epochs[epoch] == full for epoch in range(max(epochs, default=0)))


@settings(derandomize=True, max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    weights=st.lists(WEIGHTS, min_size=3, max_size=3),
    cursor=st.integers(1, 300),
    moved=st.integers(1, 100),
)
def test_other_later_stages_leave_the_past_as_it_was(
    seed: int, weights: list[tuple[int, ...]], cursor: int, moved: int
) -> None:
    before = new_stream(seed, MixtureStage(0, weights[0], SEQ_LEN), MixtureStage(cursor + 50, weights[1], SEQ_LEN))
    changed = replace(before, stages=(before.stages[0], MixtureStage(cursor + moved, weights[2], SEQ_LEN)))
    now = continued_stream(before, changed, cursor).stream
    past = list(range(cursor))
    assert places(now, past) == places(before, past)
