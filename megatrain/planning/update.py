"""The memory and the messages of an update that exchanges whole matrices: the trainer's own exchange runs on meta.

Every other update works in place and sends no more than small sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.parallel.matrix_exchange import matrix_exchanges
from megatrain.planning.chunks import PlannedChunk
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """The memory and traffic of a rank's update, besides its state.

    working: bytes at the peak. sent: bytes to other ranks, by the name of the group.
    """

    working: int = 0
    sent: Mapping[str, int] = field(default_factory=dict)


IN_PLACE = PlannedUpdate()


def plan_update(config: Config, mesh: Mesh, chunks: Sequence[PlannedChunk]) -> PlannedUpdate:
    """Return the update of the rank of `mesh`, from planned_mesh. chunks: from plan_stage, all of the rank's."""
    buckets = [bucket for chunk in chunks for bucket in chunk.buckets if bucket.rule.name == "muon"]
    if not buckets:
        return IN_PLACE
    exchanges = matrix_exchanges(buckets, mesh.along, config.optimizer.muon_precision)
    shards = [torch.empty(bucket.shard_numel, dtype=bucket.gradient_dtype, device="meta") for bucket in buckets]
    with PeakTensorBytes(on_meta=True).include(shards) as memory:  # the gradients, which exist already
        for exchange in exchanges:
            exchange.orthogonalize_(shards, lambda _: 1.0)
    existing = sum(shard.nbytes for shard in shards)
    sent: Counter[str] = Counter()
    for exchange in exchanges:
        sent.update(exchange.bytes_sent)
    return PlannedUpdate(memory.peak_bytes - existing, sent)
