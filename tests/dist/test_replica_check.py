"""Parameters are compared over dp during training: a rank that differs is named, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import ReplicaError
from megatrain.contracts.layout import Layout
from megatrain.parallel.data_parallel import ChunkDataParallel, DataParallelOptions
from megatrain.parallel.pipeline import Pipeline
from megatrain.parallel.placement import Cut, PlacementRow, placements_of, tensor_shape
from megatrain.parallel.sharding import LogicalParameter
from megatrain.training.rank_model import RankModel
from megatrain.training.replica_check import ReplicaCheck, differing_rows
from tests.dist.training_jobs import Tables, TrainingJobs, assert_states_bitwise
from tests.helpers.black_boxes import boxes_by_rank, recording_in, spans_by_step
from tests.helpers.joined_mesh import joined_mesh
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.single_rank import SilentRecorder
from tests.helpers.training_case import CaseOrders, RankRecord, make_config, on_layout, train_on_rank

STEPS = 4
SMALL: Tables = {"model": {"num_layers": 2}, "train": {"steps": STEPS, "checksum_interval": 2}}


@dataclass(frozen=True, slots=True)
class Flip:
    """Flips, on `rank`, the lowest bit of element `index` of a parameter in every step from `step` on. Each gather
    repairs it."""

    rank: int
    step: int
    parameter: str
    index: int = 0


def train_with_flipped_bits(
    context: RankContext, config: Config, orders: CaseOrders, flips: tuple[Flip, ...]
) -> RankRecord:
    """Run as a worker of a job in which some ranks change bits after a gather."""
    train = Pipeline.train
    steps = count(1)

    def train_and_flip(pipeline: Pipeline, *args: Any) -> torch.Tensor:
        loss = train(pipeline, *args)
        step = next(steps)
        names = {flip.parameter: flip for flip in flips if flip.rank == context.rank and step >= flip.step}
        for chunk in pipeline.chunks:
            for logical in (logical for bucket in chunk.data_parallel.buckets for logical in bucket.parameters):
                if logical.name in names:
                    bits = logical.parameter.detach().view(-1).view(torch.int64)
                    bits[names.pop(logical.name).index] ^= 1
        assert not names
        return loss

    with patch.object(Pipeline, "train", train_and_flip):
        return train_on_rank(context, config, orders)


def failures_of(pool: RankPool, config: Config, *flips: Flip) -> list[str]:
    """Return the error of each rank of a failing job, in rank order."""
    with pytest.raises(RankError) as caught:
        pool.run(train_with_flipped_bits, config.layout(None).world_size, config, CaseOrders(), flips)
    return [failure.description for failure in sorted(caught.value.failures, key=lambda failure: failure.rank)]


def test_a_flipped_bit_ends_the_run_on_all_ranks_and_is_named(rank_pool: RankPool, train_data: Tables) -> None:
    config = make_config(train_data, SMALL, on_layout(1, 1, 4))
    name = "blocks.1.mlp_branch.mlp.down.weight"
    found = failures_of(rank_pool, config, Flip(2, 2, name, index=7))
    expected = (
        f"ReplicaError: parameters differ at step 2 in {name} (chunk 0): rank 2 differs from most of the replicas "
        f"on ranks 0-3 (train.checksum_interval=2, never found equal by this process)"
    )
    assert len(found) == 4
    for description in found:
        assert expected in description


@pytest.mark.slow
def test_flipped_bits_are_found_at_the_next_interval(rank_pool: RankPool, train_data: Tables) -> None:
    config = make_config(train_data, SMALL, on_layout(1, 1, 2), {"train": {"steps": 6, "checksum_interval": 3}})

    for description in failures_of(
        rank_pool, config, Flip(1, 5, "embedding.word.weight"), Flip(0, 4, "blocks.0.mlp_branch.norm.weight")
    ):
        assert "parameters differ at step 6 in " in description
        assert "embedding.word.weight (chunk 0)" in description
        assert "blocks.0.mlp_branch.norm.weight (chunk 0)" in description
        assert "the replicas on ranks 0-1 have no majority, so the wrong one is unknown" in description
        assert "last found equal at step 3)" in description


def compare_on_more_axes(context: RankContext, layout: Layout, odd_rank: int, odd_name: str) -> str:
    """Run as a rank that holds a dense parameter and experts, compare them, and return the findings. On `odd_rank` the
    last bit of one of the two is flipped."""
    rank = context.rank
    mesh = joined_mesh(context, layout, SilentRecorder())
    options = DataParallelOptions(1, torch.float64, torch.float64, torch.float64, bucket_size=1, has_overlap=False)
    parameters = []
    for row, shape in MORE_ROWS if "ep" in layout.axes else MORE_ROWS[:1]:
        placements = placements_of(row.pattern, shape, row, layout, rank)
        memory = torch.zeros(tensor_shape(placements), dtype=torch.float64)
        parameters.append(LogicalParameter(nn.Parameter(memory), placements))
    chunk = ChunkDataParallel(parameters, mesh.by_name, options, mesh.device)
    for logical in parameters:
        logical.parameter.data.fill_(float(logical.placements[0].box.offsets[0]))
        if (rank, logical.name) == (odd_rank, odd_name):
            logical.parameter.data.view(torch.int64)[0] ^= 1
    check = ReplicaCheck(1, cast(RankModel, SimpleNamespace(mesh=mesh, data_parallel=[chunk], device=mesh.device)))
    with pytest.raises(ReplicaError) as caught:
        check.check(1)
    return str(caught.value)


MORE_ROWS = [(PlacementRow("dense", Cut("tp", 0)), (8,)), (PlacementRow("experts", Cut("ep", 0), ("edp",)), (8,))]


@pytest.mark.slow(
    kept=["pp_size=1 dp_size=1 cp_size=4 tp_size=1-3-dense-rank 3 differs from most of the replicas on ranks 0-3"]
)
@pytest.mark.parametrize(
    ("layout", "odd_rank", "odd_name", "who"),
    [
        # rank = (dp * 2 + cp) * 2 + tp: along cp alone, ranks 2 and 0 could not be distinguished
        (Layout(dp_size=2, cp_size=2, tp_size=2), 2, "dense", "rank 2 differs from most of the replicas on ranks 0, 2"),
        (Layout(cp_size=4), 3, "dense", "rank 3 differs from most of the replicas on ranks 0-3"),
        # rank = edp * 2 + ep
        (Layout(tp_size=8, ep_size=2), 4, "experts", "rank 4 differs from most of the replicas on ranks 0, 2, 4, 6"),
        (Layout(dp_size=4, ep_size=2), 1, "experts", "the replicas on ranks 1, 3 have no majority"),
    ],
    ids=str,
)
def test_ranks_with_the_same_part_are_compared(
    layout: Layout, odd_rank: int, odd_name: str, who: str, rank_pool: RankPool
) -> None:
    for found in rank_pool.run(compare_on_more_axes, layout.world_size, layout, odd_rank, odd_name):
        assert f"parameters differ at step 1 in {odd_name} (chunk 0): {who}" in found


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_checksums_do_not_change_a_clean_run(
    overlap: bool, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    layout = on_layout(2, 1, 2, 2)
    precision: Tables = {
        "train": {**SMALL["train"], "precision": "bf16"},
        "parallel": {**layout["parallel"], "overlap": overlap},
    }
    checked = make_config(train_data, SMALL, layout, precision, recording_in(tmp_path))
    plain = replace(checked, train=replace(checked.train, checksum_interval=0), telemetry=make_config().telemetry)

    found, expected = jobs.run(checked), jobs.run(plain)

    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    assert_states_bitwise(found.final_state, expected.final_state)
    for box in boxes_by_rank(tmp_path).values():
        # one exchange per check
        assert spans_by_step(box, Operation.CHECKSUM) == {1: 1, 3: 1}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1, 2), (1, 2), (1, 3)], (2,)),
        ([(1, 2), (9, 9), (1, 2), (1, 2), (0, 0)], (1, 4)),
        ([(1,), (2,)], None),
        ([(1,), (1,), (2,), (2,)], None),
        ([(1,), (1,), (2,), (3,)], None),
        ([(5,), (5,)], ()),
    ],
)
def test_odd_rows_differ_from_the_majority(rows: list[tuple[int, ...]], expected: tuple[int, ...] | None) -> None:
    assert differing_rows(rows) == expected
