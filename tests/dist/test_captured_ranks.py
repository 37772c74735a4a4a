"""Replicas that replay captured micro-batches exchange and compute what replicas without a capture do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.comm.exchange import Exchange
from megatrain.contracts.black_box.operations import Operation
from megatrain.training.rank_model import build_rank_model
from tests.helpers.late_exchanges import SHALLOW, SHORT, Tables, open_mesh, train_digest
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.replayed_operations import ReplayedOperations
from tests.helpers.training_case import make_config, on_layout

STEPS = 5
"""Two without a graph; the third captures the graphs of its micro-batches."""
REDUCED, GATHERED = Operation.GRADS_REDUCE_SCATTER, Operation.PARAMS_ALL_GATHER
Trained = tuple[str, list[Any]]
"""The digest of a run, and the exchanges of its buckets: operation, chunk and bytes, in the order of their starts."""


def train_both(context: RankContext, parallel: Tables) -> tuple[Trained, Trained, list[int]]:
    """Train without and with a capture. Also returns how often each graph was replayed. Runs on the pool."""
    config = make_config(SHORT, SHALLOW, on_layout(1, 1, 2), parallel, {"kernels": {"cuda_graphs": True}})
    started: list[Exchange] = []
    mesh, recorder = open_mesh(context, config, started.append)
    capture, device = ReplayedOperations(), torch.device("cpu")
    trained = []
    for of_run in (None, capture):
        started.clear()
        digest = train_digest(build_rank_model(config, mesh, recorder, device, of_run), recorder, STEPS)
        exchanges = [
            (one.operation, one.chunk, one.num_bytes) for one in started if one.operation in (REDUCED, GATHERED)
        ]
        trained.append((digest, exchanges))
    mesh.barrier()
    recorder.close()
    return trained[0], trained[1], capture.num_replays


@pytest.mark.parametrize("overlap", [True, False])
def test_captured_ranks_start_the_same_exchanges_in_order(overlap: bool, rank_pool: RankPool) -> None:
    """Without a capture a bucket starts in the backward that completes it; with one, all start at the end of it."""
    orders = []
    for plain, captured, num_replays in rank_pool.run(train_both, 2, {"parallel": {"overlap": overlap}}):
        assert captured == plain
        orders.append(plain[1])
        assert num_replays == [3, 3, 3, 3], "forward and backward of the first micro-batch, then of the second"

    assert orders == [orders[0]] * 2, "all ranks start the same exchanges in the same order"
    operations = [operation for operation, _, _ in orders[0]]
    num_buckets = operations.index(REDUCED)
    assert num_buckets > 1
    assert operations == num_buckets * [GATHERED] + STEPS * (num_buckets * [REDUCED] + num_buckets * [GATHERED])
