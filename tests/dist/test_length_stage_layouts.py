"""Stages with different sample lengths: the same numbers on one device and in any layout, also after a resume.

The first change is planned in the middle of a step and takes effect at the next step; the second change makes samples
shorter.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from megatrain.data.bins import write_bins
from megatrain.data.indexed import IndexedDataset
from tests.dist.training_jobs import Run, Tables, TrainingJobs, assert_close, distance
from tests.helpers.training_case import CaseOrders, make_config, on_layout
from tests.helpers.waiting import wait_until

LENGTHS: Tables = {
    "data": {"train": "", "seq_len": 4, "block_tokens": 16, "part_tokens": 96, "has_document_mask": True},
    "data_stage": {"after_tokens": 50, "seq_len": 16, "global_batch_size": 4},
    "data_stage-2": {"after_tokens": 300, "seq_len": 8},
    "evaluation": {"seq_len": 8},
    "model": {"num_layers": 2},
    "train": {"steps": 8},
}
# Computed by hand: token 50 is in the step at sample 8, token 300 in the step at sample 28.
SIZES = [8, 8, 4, 4, 4, 4, 4, 4]
SEQ_LENS = [4, 4, 16, 16, 16, 16, 8, 8]


def tables(train_data: Tables) -> Tables:
    return {**LENGTHS, "data_source": {"path": train_data["data"]["train"], "name": "web"}}


def assert_same_numbers(runs: list[Run], reference: Run) -> None:
    """Check that consecutive runs together equal `reference`, which had no stop."""
    steps = [step for run in runs for step in run.steps]
    assert [step.global_batch_size for step in steps] == SIZES
    assert [step.seq_len for step in steps] == SEQ_LENS
    tokens = accumulate(size * seq_len for size, seq_len in zip(SIZES, SEQ_LENS, strict=True))
    assert [step.consumed_tokens for step in steps] == list(tokens)
    assert_close([loss for run in runs for loss in run.losses], reference.losses, 1e-10, "loss")
    assert max(distance(runs[-1].final, reference.final).values()) <= 1e-10


@pytest.mark.slow(kept=["tp2-pp2"])
@pytest.mark.parametrize(
    "layout",
    [on_layout(2, 2, 1), {"parallel": {"dp_size": 3, "pp_size": 2, "zero_stage": 2}}],
    ids=["tp2-pp2", "pp2-dp3-zero2"],
)
def test_lengths_train_alike_on_one_device_and_in_a_layout(
    layout: Tables, jobs: TrainingJobs, train_data: Tables
) -> None:
    reference = jobs.remembered(make_config(tables(train_data)))
    run = jobs.run(make_config(tables(train_data), layout))
    assert_same_numbers([run], reference)
    begins = [note.partition(", until")[0] for note in run.ranks[0].notes if "samples have" in note]
    assert begins == [
        (
            "from step 3 on, samples have 16 tokens: at sample 16, after 64 tokens (after_tokens=50, rounded up to a "
            "whole step); 2 of them are assembled from windows of the previous length"
        ),
        (
            "from step 7 on, samples have 8 tokens: at sample 32, after 320 tokens (after_tokens=300, rounded up to a "
            "whole step); 8 of them are assembled from windows of the previous length"
        ),
    ]


@pytest.mark.slow
def test_packed_lengths_train_alike_in_a_layout(jobs: TrainingJobs, train_data: Tables) -> None:
    prefix = Path(train_data["data"]["train"])
    for seq_len in set(SEQ_LENS):
        write_bins(IndexedDataset(prefix), seq_len)
    found = tables(train_data)
    data = {"train": "", "seq_len": 4, "has_document_mask": True, "packing": "best_fit", "balance": "cost"}
    reference = jobs.run(make_config(found | {"data": data | {"balance": "none"}}))
    assert_same_numbers([jobs.run(make_config(found | {"data": data}, on_layout(1, 2, 2)))], reference)


@pytest.mark.slow
def test_lengths_go_on_through_4_3_2_and_5_replicas(jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    """The stages are added before they begin, and the run stops at the beginning of one stage and in the middle of
    another. At the end one of 5 replicas has no sample."""
    place: Tables = {"job": {"run_directory": str(tmp_path)}}
    reference = jobs.remembered(make_config(tables(train_data)))
    runs = []
    for dp_size, stop in ((4, 1), (3, 2), (2, 5), (5, None)):
        config = {**tables(train_data), "parallel": {"bucket_size": 3000, "dp_size": dp_size}}
        if stop == 1:
            # The run begins without stages.
            config = {name: table for name, table in config.items() if not name.startswith("data_stage")}
        orders = CaseOrders() if stop is None else CaseOrders(stop_at=(dp_size - 1, stop - 1))
        runs.append(jobs.run(make_config(config, place), orders))
        wait_until(lambda: not list(tmp_path.glob("megatrain-arena*")), "no snapshot left in memory")
    assert [len(run.steps) for run in runs] == [1, 1, 3, 3]
    assert_same_numbers(runs, reference)
