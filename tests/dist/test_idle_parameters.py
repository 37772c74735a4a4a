"""An expert that gets no token in some micro-batches delays no other gradient, and no number changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from megatrain.contracts.layout import Layout
from megatrain.parallel.data_parallel import ChunkDataParallel, DataParallelOptions
from megatrain.parallel.placement import PlacementRow
from megatrain.parallel.tensor_plan import TensorPlan, apply_tensor_plan
from tests.helpers.joined_mesh import joined_mesh
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.single_rank import SilentRecorder

WIDTH, BATCH, LR = 6, 4, 0.05
NUM_REPLICAS, NUM_MICROBATCHES = 2, 2
USES = (
    ((True, True), (True, True)),
    ((True, False), (False, False)),
    ((False, False), (False, False)),
    ((False, True), (True, False)),
)
"""For each step and each replica, which of its micro-batches use the expert."""
TABLE = (PlacementRow("expert.weight", may_lack_gradient=True), PlacementRow("*"))
Values = dict[str, Tensor]


class Routed(nn.Module):
    """Three layers; only some micro-batches use the middle one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.expert = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x_BH: Tensor, is_chosen: bool) -> Tensor:
        x_BH = self.first(x_BH).tanh()
        if is_chosen:
            x_BH = x_BH + self.expert(x_BH)
        loss: Tensor = self.last(x_BH).square().sum()
        return loss


def initial_values() -> Values:
    torch.manual_seed(0)
    return copy.deepcopy(Routed().double().state_dict())


def microbatch(step: int, replica: int, number: int) -> Tensor:
    """Return the inputs [B, H] of a micro-batch."""
    generator = torch.Generator().manual_seed(100 * step + 10 * replica + number)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def train_alone() -> list[Values]:
    """Return the parameters after each step of one process with torch's optimizer."""
    model = Routed().double()
    model.load_state_dict(initial_values())
    optimizer = torch.optim.SGD(model.parameters(), LR)
    found = []
    for step, of_replicas in enumerate(USES):
        optimizer.zero_grad()
        for replica, uses in enumerate(of_replicas):
            for number, is_chosen in enumerate(uses):
                model(microbatch(step, replica, number), is_chosen).backward()
        optimizer.step()
        found.append(copy.deepcopy(model.state_dict()))
    return found


def train_replica(context: RankContext, zero_stage: int) -> tuple[list[Values], list[int]]:
    """Train one replica with a bucket for each parameter. Runs on the pool.

    Returns the parameters after each step, and for each reduction how many buckets started before the backward ended.
    """
    layout = Layout(dp_size=NUM_REPLICAS)
    mesh = joined_mesh(context, layout, SilentRecorder())
    with torch.device("meta"):
        module = Routed()
    plan = TensorPlan(TABLE, layout, context.rank, mesh.tp, recompute="none", vocab_size=0)
    parameters, _ = apply_tensor_plan(module, plan)
    double = torch.float64
    options = DataParallelOptions(zero_stage, double, double, double, bucket_size=1, has_overlap=True)
    chunk = ChunkDataParallel(parameters, mesh.by_name, options, mesh.device)
    chunk.overlap_by_bucket(module)
    module.load_state_dict(initial_values())
    found, num_early = [], []
    for step, of_replicas in enumerate(USES):
        chunk.start_step()
        chunk.set_num_microbatches(NUM_MICROBATCHES)
        for number, is_chosen in enumerate(of_replicas[context.rank]):
            chunk.await_parameters()
            loss = module(microbatch(step, context.rank, number), is_chosen)
            chunk.finish_earlier_reductions()
            chunk.before_backward()
            num_calls = mesh.replicas.num_calls
            loss.backward()
            if zero_stage == 2 or number == NUM_MICROBATCHES - 1:
                num_early.append(mesh.replicas.num_calls - num_calls)
            chunk.after_backward()
        chunk.reduce()
        chunk.finish_reduce()
        with torch.no_grad():
            for bucket in chunk.buckets:
                bucket.values[bucket.shard].sub_(LR * chunk.gradient_shard(bucket))
        chunk.mark_shards_changed()
        chunk.start_gather()
        chunk.finish_gather()
        found.append(copy.deepcopy(module.state_dict()))
    mesh.barrier()
    return found, num_early


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_idle_expert_delays_no_bucket_and_changes_no_number(zero_stage: int, rank_pool: RankPool) -> None:
    """The buckets of the last and of the first layer start in the backward, whether the expert is used or not."""
    expected = train_alone()
    num_reductions = len(USES) * (NUM_MICROBATCHES if zero_stage == 2 else 1)
    for found, num_early in rank_pool.run(train_replica, NUM_REPLICAS, zero_stage):
        assert num_early == [2] * num_reductions
        for of_rank, alone in zip(found, expected, strict=True):
            for name, value in alone.items():
                torch.testing.assert_close(of_rank[name], value, rtol=1e-12, atol=1e-12)
