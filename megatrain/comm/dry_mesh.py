"""The mesh of a rank of any world, in one process whose collectives do nothing: for planning and for offline work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatrain.comm.mesh import Mesh, create_mesh
from megatrain.comm.process import join_fake, leave
from megatrain.contracts.layout import Layout, Neighbours
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder


@contextmanager
def dry_mesh(
    layout: Layout, rank: int, *, has_wrap_links: bool = False, neighbours: Sequence[Neighbours] = ()
) -> Iterator[Mesh]:
    """Be `rank` of the whole world for a while."""
    join_fake(rank, layout.world_size)
    try:
        recorder = Recorder(BlackBoxWriter.anonymous())
        yield create_mesh(
            layout, rank, torch.device("cpu"), recorder, has_wrap_links=has_wrap_links, neighbours=neighbours
        )
    finally:
        leave()
