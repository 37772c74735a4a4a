"""A gradient that is not finite, on one rank, in one micro-batch: all ranks skip that step and train on."""

from __future__ import annotations

import math

import pytest

from tests.dist.training_jobs import SHALLOW, Tables, TrainingJobs, assert_close, distance
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.training_case import CaseOrders, Poison, make_config, on_layout, train_on_rank

SIZES = (2, 2, 2)
STEPS = 4
MODEL: Tables = {**SHALLOW, "train": {"steps": STEPS}, "batch": {"micro_batch_size": 1}}
SKIPPED = 2
"""The third step, counted from 0."""

# rank = (pp * 2 + dp) * 2 + tp
POISONS = {
    "nan in a tp shard of the first stage": (
        Poison(rank=3, steps=(SKIPPED,), parameter="blocks.0.attention_branch.attention.qkv.weight", microbatch=1),
        {},
    ),
    "infinity in a tp replica of the last stage": (
        Poison(rank=7, steps=(SKIPPED,), parameter="blocks.1.mlp_branch.norm.weight", factor=math.inf),
        {},
    ),
    "nan in the head's copy of a tied embedding": (
        Poison(rank=6, steps=(SKIPPED,), parameter="loss_head.weight", microbatch=3),
        {},
    ),
    "nan with sharded gradients and LAMB": (
        Poison(rank=1, steps=(SKIPPED,), parameter="blocks.0.mlp_branch.mlp.down.weight", microbatch=2),
        {"parallel": {"zero_stage": 2}, "optimizer": {"name": "lamb"}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", POISONS)
def test_all_ranks_skip_a_step_that_is_not_finite(case: str, jobs: TrainingJobs, train_data: Tables) -> None:
    poison, options = POISONS[case]
    run = jobs.run(make_config(train_data, on_layout(*SIZES), MODEL, options), CaseOrders(poison=poison))

    for record in run.ranks:
        assert [report.is_skipped for report in record.steps] == [step == SKIPPED for step in range(STEPS)]
        assert [report.num_skipped for report in record.steps] == [0, 0, 1, 1]
        # weights and moments are untouched, bit by bit
        assert record.digests[SKIPPED] == record.digests[SKIPPED - 1]
        assert len(set(record.digests)) == 3
        assert record.num_updates == 3
    # The batch of the skipped step is consumed, and the learning rate has moved on, as in one process.
    alone = Poison(rank=0, steps=(SKIPPED,), parameter="blocks.0.mlp_branch.mlp.up.weight")
    reference = jobs.run(
        make_config(train_data, MODEL, {"optimizer": options.get("optimizer", {})}), CaseOrders(poison=alone)
    )
    finite = [step for step in range(STEPS) if step != SKIPPED]
    assert [report.consumed_samples for report in run.steps] == [8, 16, 24, 32]
    assert [report.lr for report in run.steps] == [report.lr for report in reference.steps]
    assert_close([run.losses[step] for step in finite], [reference.losses[step] for step in finite], 1e-10, "loss")
    assert max(distance(run.final, reference.final).values()) <= 1e-10


@pytest.mark.slow
def test_too_many_skipped_steps_in_a_row_stop_all_ranks(rank_pool: RankPool, train_data: Tables) -> None:
    config = make_config(train_data, {"train": {"steps": 9, "max_skipped_steps": 3}}, SHALLOW, on_layout(2, 1, 1))
    # Two consecutive skips are allowed; a good step resets the count.
    poison = Poison(rank=1, steps=(1, 2, 4, 5, 6), parameter="blocks.1.mlp_branch.mlp.down.weight")

    with pytest.raises(RankError) as caught:
        rank_pool.run(train_on_rank, 2, config, CaseOrders(poison=poison))

    assert sorted(failure.rank for failure in caught.value.failures) == [0, 1]
    for failure in caught.value.failures:
        assert "NonFiniteError: loss=" in failure.description
        assert "at step 7: not finite for 3 steps in a row (train.max_skipped_steps)" in failure.description


def test_limit_of_one_stops_at_the_first_skipped_step(rank_pool: RankPool, train_data: Tables) -> None:
    config = make_config(train_data, {"train": {"max_skipped_steps": 1}})
    poison = Poison(rank=0, steps=(2,), parameter="blocks.1.mlp_branch.mlp.down.weight")

    with pytest.raises(RankError, match=r"NonFiniteError: .* at step 3: not finite"):
        rank_pool.run(train_on_rank, 1, config, CaseOrders(poison=poison))
