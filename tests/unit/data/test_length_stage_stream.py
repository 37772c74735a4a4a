"""The samples of a mixture whose length changes: the same for any layouts and stops, each token of an epoch once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.checkpoint.continued_lengths import with_aligned_lengths
from megatrain.checkpoint.continued_stream import continued_stream
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.config.batch import BatchConfig, BatchSchedule, BatchStage
from megatrain.config.stages import DataStageConfig, placed_stages
from megatrain.contracts.step_plan import Dealing, StepPlan
from megatrain.data.mixture import Mixture
from megatrain.data.order import SampleOrder
from megatrain.data.parts import PartSizes

SOURCES = {"web": 803, "code": 430, "books": 129}
REPLICAS = (8, 7, 3, 8)
WEIGHTS = st.tuples(*[st.integers(1, 6)] * len(SOURCES))
Place = tuple[int, tuple[tuple[int, int], ...]]
"""Source, and the pieces of a sample: first token and number of labels."""


def orders(stream: SampleStream, sizes: PartSizes) -> list[SampleOrder]:
    mixture = Mixture.of(stream)
    return [
        SampleOrder(source.num_tokens, 1, stream.seed, sizes=sizes).with_lengths(mixture.lengths_of(number))
        for number, source in enumerate(stream.sources)
    ]


def places(stream: SampleStream, sizes: PartSizes, samples: list[int]) -> list[Place]:
    """Return the place of each sample."""
    sources, indices = Mixture.of(stream).places(np.array(samples, dtype=np.int64))
    found: dict[int, Place] = {}
    for source, order in enumerate(orders(stream, sizes)):
        own = np.flatnonzero(sources == source)
        starts, labels, bounds = (array.tolist() for array in order.pieces(indices[own]))
        for number, first, end in zip(own.tolist(), bounds[:-1], bounds[1:], strict=True):
            found[number] = source, tuple(zip(starts[first:end], labels[first:end], strict=True))
    return [place for _, place in sorted(found.items())]


@settings(derandomize=True, max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    weights=WEIGHTS,
    begins=st.lists(st.integers(1, 2500), min_size=2, max_size=2, unique=True).map(sorted),
    lengths=st.lists(st.sampled_from([2, 4, 8, 16]), min_size=3, max_size=3),
    batches=st.lists(st.integers(1, 30), min_size=3, max_size=3),
    stops=st.lists(st.integers(0, 8), min_size=4, max_size=4),
    sizes=st.sampled_from([PartSizes(), PartSizes(16, 64)]),
)
def test_stream_of_two_lengths_is_the_same_for_all_layouts(
    seed: int,
    weights: tuple[int, ...],
    begins: list[int],
    lengths: list[int],
    batches: list[int],
    stops: list[int],
    sizes: PartSizes,
) -> None:
    """Replicas change from 8 to 7, 3 and 8. The run begins without stages, which are added at the first stop."""
    stages = [
        DataStageConfig(after_tokens=tokens, seq_len=seq_len, global_batch_size=size)
        for tokens, seq_len, size in zip(begins, lengths[1:], batches[1:], strict=True)
    ]
    batch = BatchConfig(global_batch_size=batches[0])
    placed = placed_stages(stages, batch, lengths[0])
    schedule = BatchSchedule(batch, tuple(BatchStage(one.first_sample, one.stage.global_batch_size) for one in placed))
    sources = tuple(StreamSource(name, num_tokens, name) for name, num_tokens in SOURCES.items())
    first = MixtureStage(0, weights, lengths[0])
    later = [MixtureStage(one.first_sample, weights, one.seq_len) for one in placed]
    planned = SampleStream(seed, sources, (first, *later))
    planned = with_aligned_lengths(planned, schedule, 0)

    # The oracle: the steps of a run that has the stages from the beginning, and never stops.
    expected = places(planned, sizes, list(range(schedule.cursor_after(0, sum(stops), ()))))
    is_begun_late = schedule.cursor_after(0, stops[0], ()) <= placed[0].first_sample
    stream = SampleStream(seed, sources, (first,)) if is_begun_late else planned
    found: list[Place] = []
    cursor = 0
    for num_replicas, num_steps in zip(REPLICAS, stops, strict=True):
        for begin, size in [pair for pair, _ in zip(schedule.steps_from(cursor, ()), range(num_steps), strict=False)]:
            plan = StepPlan(begin, size, 1, Dealing(size, num_replicas))
            slots = [plan.slots(replica) for replica in range(num_replicas)]
            dealt = sorted(number for slot in slots for numbers in slot for number in numbers)
            assert len({Mixture.of(stream).seq_len(number) for number in dealt}) == 1
            found += places(stream, sizes, dealt)
        cursor = schedule.cursor_after(cursor, num_steps, ())
        continued = continued_stream(stream, planned, cursor)
        assert not continued.problem
        stream = with_aligned_lengths(continued.stream, schedule, cursor)
    assert found == expected
    assert_read_once(planned, sizes, expected)


def assert_read_once(stream: SampleStream, sizes: PartSizes, found: list[Place]) -> None:
    """Check that the samples of each source fill its epochs one after another."""
    for number, order in enumerate(orders(stream, sizes)):
        own = [pieces for source, pieces in found if source == number]
        seq_lens = order.lengths(np.arange(len(own))).tolist()
        first = 0
        while first < len(own):
            # the first sample of an epoch determines its size
            size = (order.num_tokens - seq_lens[first]) // seq_lens[first] * seq_lens[first]
            tokens: list[int] = []
            while first < len(own) and len(tokens) < size:
                tokens += [token for start, count in own[first] for token in range(start, start + count)]
                first += 1
            assert len(set(tokens)) == len(tokens)
            assert max(tokens) - min(tokens) < size
