"""The batches that the loader of a host writes to its ring: those that each rank would read alone, each read once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.checkpoint_format.sample_stream import MixtureStage
from megatrain.config.data import DataConfig
from megatrain.contracts.errors import CheckpointError, DataError
from megatrain.contracts.layout import Layout
from megatrain.data.bins import write_bins
from megatrain.data.costs import write_costs
from megatrain.data.dataset import open_dataset
from megatrain.data.indexed import token_dtype
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.loader.decision import Fill, Idle, decide
from megatrain.data.loader.plan import LoaderPlan, Share, loader_plan, shares_of
from megatrain.data.loader.process import RingFiller
from megatrain.data.loader.ring import Ring, RingState
from megatrain.data.loader.ring_layout import RingLayout
from megatrain.data.reader import BatchReader
from megatrain.training.training_data import open_reader, sample_stream
from tests.helpers.host_loading import content, corpus, new_ring, read_alone, steps
from tests.helpers.mixed_data import FIRST_TOKEN, VOCAB_SIZE, write_mixture
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import make_config

NUM_STEPS = 6


class KilledError(Exception):
    """Replaces SIGKILL."""


class FragileRing(Ring):
    """A ring whose loader is killed before its store number `lives`."""

    def __init__(self, buffer: Any, layout: RingLayout, lives: int) -> None:
        super().__init__(buffer, layout)
        self._lives = lives

    def _store(self) -> None:
        if self._lives == 0:
            raise KilledError
        self._lives -= 1

    def begin(self, share: int, step: int) -> None:
        self._store()
        super().begin(share, step)

    def put(self, share: int, step: int, content: Any) -> None:
        self._store()
        super().put(share, step, content)

    def publish(self, share: int, step: int) -> None:
        self._store()
        super().publish(share, step)


def fill_all(reads: RingFiller) -> Idle:
    """Read until nothing is left to read."""
    while isinstance(due := reads.next(), Fill):
        reads.fill(due)
    return due


def read_all(
    plan: LoaderPlan, open_reader: Callable[[], BatchReader], ranks: Sequence[int], layout: Layout, lives: int = -1
) -> list[Any]:
    """Deliver all steps to the ranks of a host, which read alternately; return the batches of each.

    lives: the stores after which a loader is killed; a new one then continues with the ring.
    """
    ring_layout, names = RingLayout.of(plan), open_reader().source_names
    buffer = bytearray(ring_layout.num_bytes)
    ring, reads = Ring(buffer, ring_layout), RingFiller(plan, FragileRing(buffer, ring_layout, lives), open_reader)
    found: list[Any] = [[] for _ in ranks]
    for step, step_plan in enumerate(plan.steps.plans()):
        for reader in range(len(ranks)):
            ring.set_done(reader, step)
            try:
                fill_all(reads)
            except KilledError:
                reads = RingFiller(plan, ring, open_reader)
                fill_all(reads)
        for reader, rank in enumerate(ranks):
            share = plan.share_of(reader)
            assert ring.is_filled(share, step)
            has_tokens = layout.index("pp", rank) in (0, layout.pp_size - 1)
            found[reader].append(content(ring.read(share, step, step_plan, names), has_tokens=has_tokens))
    assert fill_all(reads) is Idle.COMPLETE
    return found


def expected(plan: LoaderPlan, reader: BatchReader, ranks: Sequence[int], layout: Layout) -> list[Any]:
    ends = (0, layout.pp_size - 1)
    return [
        [
            content(batch, has_tokens=layout.index("pp", rank) in ends)
            for batch in read_alone(reader, plan.steps, layout, rank)
        ]
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("sizes", "ranks", "prefetch", "has_document_mask"),
    [
        (*place, prefetch, number % 2 == 1)
        for number, (place, prefetch) in enumerate(
            itertools.product(
                [
                    ({}, [0]),
                    ({"dp_size": 3}, [0, 1, 2]),
                    ({"tp_size": 2, "pp_size": 2}, [0, 1, 2, 3]),
                    ({"tp_size": 2, "pp_size": 3, "dp_size": 2}, [2, 3, 4, 5, 6, 7]),
                    ({"pp_size": 4, "dp_size": 2}, [2, 3, 4, 5]),
                ],
                [0, 1, 3],
            )
        )
    ],
)
def test_each_rank_gets_the_batches_it_would_read(
    tmp_path: Path, sizes: dict[str, int], ranks: list[int], prefetch: int, has_document_mask: bool
) -> None:
    layout, data = Layout(**sizes), corpus(tmp_path, has_document_mask=has_document_mask)
    for cursor, num_steps in ((0, NUM_STEPS), (16, 3)):
        plan = data.plan(layout, ranks, steps(layout, num_steps, cursor, least_slots=layout.pp_size), prefetch)
        assert read_all(plan, lambda: data.reader, ranks, layout) == expected(plan, data.reader, ranks, layout)


@pytest.mark.parametrize(
    ("packing", "balance"), [("none", "none"), ("best_fit", "none"), ("best_fit", "cost"), ("none", "file")]
)
def test_mixed_and_packed_samples_pass_the_ring(tmp_path: Path, packing: str, balance: str) -> None:
    config = make_config(write_mixture(tmp_path), {"data": {"packing": packing, "balance": balance}})
    if packing != "none":
        for name in FIRST_TOKEN:
            write_bins(open_dataset(tmp_path / name, config.model.vocab_size)[0], config.model.seq_len)
    if balance == "file":
        for name in FIRST_TOKEN:
            dataset, _ = open_dataset(tmp_path / name, config.model.vocab_size)
            write_costs(dataset, (str(number % 7) for number in range(dataset.num_documents)), name)
    reader, layout, ranks = open_reader(config), Layout(tp_size=2, pp_size=3, dp_size=2), range(2, 8)
    sequence = steps(layout, NUM_STEPS, least_slots=layout.pp_size)
    plan = loader_plan(reader, sample_stream(config, reader, ()), sequence, layout, ranks, DataConfig(prefetch=1))
    whole = expected(plan, reader, ranks, layout)
    assert {source for batch in whole[0] for sources in batch[3][1] for source in sources} == {0, 1}
    assert plan.is_packed == (packing != "none")
    received = LoaderPlan.from_json(plan.to_json().encode(), "plan")
    assert read_all(received, received.open_reader, ranks, layout) == whole
    if balance == "file":
        write_costs(dataset, ["5"] * dataset.num_documents, name)
        with pytest.raises(DataError, match=r"\.costs: has digest .* it was replaced during the run"):
            received.open_reader()


@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize("ends_early", [False, True])
def test_samples_of_two_lengths_pass_the_ring(tmp_path: Path, ends_early: bool, packing: str) -> None:
    tables, weights = write_mixture(tmp_path), (1, 1)
    if ends_early:  # A source without long samples may be too small for them.
        weights = (1, 0)
        with IndexedWriter(tmp_path / "code", token_dtype(VOCAB_SIZE)) as writer:
            writer.add_document(np.arange(FIRST_TOKEN["code"], FIRST_TOKEN["code"] + 20))
    config = make_config(tables, {"data": {"seq_len": 4, "balance": "cost", "packing": packing}})
    if packing != "none":
        for name, seq_len in itertools.product(FIRST_TOKEN, (4, config.model.seq_len)):
            write_bins(open_dataset(tmp_path / name, config.model.vocab_size)[0], seq_len)
    begun = sample_stream(config, open_reader(config), ())
    # a step begins at sample 14
    stream = replace(begun, stages=(begun.stages[0], MixtureStage(14, weights, config.model.seq_len)))
    reader, layout, ranks = open_reader(config).following(stream), Layout(tp_size=2, pp_size=3, dp_size=2), range(2, 8)
    plan = loader_plan(
        reader, stream, steps(layout, NUM_STEPS, least_slots=layout.pp_size), layout, ranks, DataConfig(prefetch=1)
    )
    lengths = [batch.seq_len for batch in read_alone(reader, plan.steps, layout, 2)]
    assert lengths == [4, 4, 4, 16, 16, 16]
    received = LoaderPlan.from_json(plan.to_json().encode(), "plan")
    assert read_all(received, received.open_reader, ranks, layout) == expected(plan, reader, ranks, layout)


def test_peers_of_a_replica_read_its_tokens_once(tmp_path: Path) -> None:
    data, layout = corpus(tmp_path), Layout(tp_size=2, pp_size=2)
    plan = data.plan(layout, range(4), steps(layout, NUM_STEPS))
    read_all(plan, lambda: data.reader, range(4), layout)
    by_host, data.dataset.num_read = data.dataset.num_read, 0
    assert len(list(read_alone(data.reader, plan.steps, layout, 0))) == NUM_STEPS
    assert by_host == data.dataset.num_read > 0


def test_a_host_of_middle_stages_reads_no_tokens(tmp_path: Path) -> None:
    data, layout = corpus(tmp_path), Layout(tp_size=2, pp_size=4)
    plan = data.plan(layout, range(2, 6), steps(layout, NUM_STEPS))
    assert plan.shares == (Share(0, (0, 1, 2, 3), has_tokens=False, encoders=()),)
    read_all(plan, lambda: data.reader, range(2, 6), layout)
    assert data.dataset.num_read == 0


def test_a_loader_killed_before_any_store_loses_nothing(tmp_path: Path) -> None:
    data, layout = corpus(tmp_path), Layout(dp_size=2)
    plan = data.plan(layout, [0, 1], steps(layout, 4))
    whole, num_stores = expected(plan, data.reader, [0, 1], layout), 3 * 2 * 4
    for lives in range(num_stores):
        assert read_all(plan, lambda: data.reader, [0, 1], layout, lives) == whole, f"killed before store {lives}"


def test_each_read_has_its_time_and_bytes(tmp_path: Path) -> None:
    data, layout = corpus(tmp_path), Layout()
    plan = data.plan(layout, [0], steps(layout, NUM_STEPS), prefetch=2)
    ring, reads = new_ring(plan, lambda: data.reader)
    began_ns = time.monotonic_ns()
    assert [ring.num_ready(0, 0), fill_all(reads), ring.num_ready(0, 0), ring.num_ready(0, 2)] == [0, Idle.FULL, 3, 1]
    found = [ring.read_of(0, step) for step in range(3)]
    # tokens, labels and documents, of 8 bytes each
    batches = list(read_alone(data.reader, plan.steps, layout, 0))[:3]
    assert [read.num_bytes for read in found] == [3 * 8 * batch.num_tokens for batch in batches]
    times = [began_ns, *(ns for read in found for ns in (read.start_ns, read.start_ns + read.duration_ns))]
    assert times == sorted(times)
    assert times[-1] <= time.monotonic_ns()
    ring.set_done(0, 1)
    assert (fill_all(reads), ring.num_ready(0, 0), ring.num_ready(0, 1)) == (Idle.FULL, 0, 3)


def test_plan_survives_its_file(tmp_path: Path) -> None:
    layout = Layout(tp_size=2, pp_size=2)
    plan = corpus(tmp_path).plan(layout, range(4), steps(layout, NUM_STEPS))
    assert LoaderPlan.from_json(plan.to_json().encode(), "plan") == plan
    with pytest.raises(CheckpointError, match=r"plan: depth=0; expected an integer of at least 1"):
        LoaderPlan.from_json(replace(plan, depth=0).to_json().encode(), "plan")


def test_files_replaced_in_a_round_are_refused(tmp_path: Path) -> None:
    data, layout = corpus(tmp_path), Layout()
    plan = data.plan(layout, [0], steps(layout, NUM_STEPS))
    write_corpus(tmp_path / "train", data.dataset.num_tokens, 90, seed=5)
    with pytest.raises(DataError, match=r"train: the files have version .*; they were replaced during the run"):
        plan.open_reader()


@pytest.mark.parametrize(
    ("done", "filled", "due"),
    [
        ((0, 0, 0), ((0, 0), (0, 0)), Fill(0, 0)),
        ((0, 0, 0), ((1, 0), (0, 0)), Fill(1, 0)),
        ((0, 0, 0), ((1, 0), (1, 0)), Fill(0, 1)),
        ((0, 0, 0), ((1, 2), (1, 2)), Idle.FULL),
        # One rank of the replica still uses step 0.
        ((1, 0, 0), ((1, 2), (1, 2)), Idle.FULL),
        ((1, 1, 0), ((1, 2), (1, 2)), Fill(0, 2)),
        # a slot that a killed loader left partly written
        ((1, 1, 1), ((3, 0), (3, 2)), Fill(0, 1)),
        ((2, 1, 1), ((3, 2), (3, 2)), Idle.COMPLETE),
    ],
)
def test_decision_is_the_earliest_step_that_is_missing(
    done: tuple[int, ...], filled: tuple[tuple[int, ...], ...], due: Fill | Idle
) -> None:
    shares = (Share(0, (0, 1), has_tokens=True, encoders=()), Share(1, (2,), has_tokens=True, encoders=()))
    assert decide(shares, 3, 2, RingState(done, filled)) == due


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [
        # stage 1 of 3 computes both replicas, as does stage 2
        ((4, 5, 6, 7), (Share(0, (0, 1), False, ()), Share(1, (2, 3), False, ()))),
        ((6, 7, 8, 9), (Share(0, (2, 3), True, ()), Share(1, (0, 1), False, ()))),
        ((2, 0, 1), (Share(0, (0, 1), True, (0, 1)), Share(1, (2,), True, (2,)))),
        ((11, 0), (Share(0, (0,), True, (0,)), Share(1, (1,), True, ()))),
    ],
)
def test_shares_name_each_replica_of_a_host_once(ranks: tuple[int, ...], shares: tuple[Share, ...]) -> None:
    assert shares_of(Layout(tp_size=2, pp_size=3, dp_size=2), ranks) == shares
