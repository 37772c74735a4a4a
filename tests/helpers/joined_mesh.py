"""The mesh of a rank of the pool."""

from __future__ import annotations

from typing import Any

import torch

from megatrain.comm import Mesh, create_mesh, join, open_rendezvous
from megatrain.contracts.layout import Layout
from megatrain.contracts.process import Process
from tests.helpers.rank_protocol import RankContext
from tests.helpers.waiting import DEADLINE_S


def joined_mesh(context: RankContext, layout: Layout, recorder: Any, **options: Any) -> Mesh:
    """Join the other ranks of this run, and create the groups of `layout`. `options` are those of create_mesh."""
    if context.world_size > 1:
        process = Process(context.rank, context.world_size, init_method=context.init_method)
        join(open_rendezvous(process, job="ranks", timeout_s=DEADLINE_S))
    return create_mesh(layout, context.rank, torch.device("cpu"), recorder, timeout_s=DEADLINE_S, **options)
