"""A load on ranks that hold the same parameters along several axes: together they read each stored item once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.checkpoint.checked_files import checked_index, read_index
from megatrain.checkpoint.image import key_of
from megatrain.checkpoint.load import LoadReport, load_state
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.training.rank_model import build_rank_model
from tests.helpers.joined_mesh import joined_mesh
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.saved_checkpoint import whole_state, write_as_job
from tests.helpers.single_rank import SilentRecorder, make_config


def load_on_rank(
    context: RankContext, layout: Layout, directory: Path, manifest: Manifest, config: Config
) -> tuple[LoadReport, list[str]]:
    """Run as a rank that loads its state; return its report, and the shards that differ from the saved state."""
    mesh = joined_mesh(context, layout, SilentRecorder())
    saved = build_rank_model(config, mesh, SilentRecorder(), mesh.device).saved_shards()
    shards = [(one.kind, one.shard) for one in saved]
    report = load_state(LocalLocation(directory), manifest, shards, mesh.rank, mesh.cpu_groups)
    state = whole_state(config)
    differing = []
    for kind, one in shards:
        box = tuple(slice(at, at + size) for at, size in zip(one.box.offsets, one.box.sizes, strict=True))
        if not torch.equal(one.tensor, state[key_of(kind, one.name)][box]):
            differing.append(f"{kind} {one.name}")
    return report, differing


@pytest.mark.slow(kept=["pp_size=1 dp_size=2 cp_size=2 tp_size=1"])
@pytest.mark.parametrize("layout", [Layout(cp_size=2), Layout(dp_size=2, cp_size=2)], ids=str)
def test_ranks_along_dp_and_cp_read_each_item_once(layout: Layout, rank_pool: RankPool, tmp_path: Path) -> None:
    config = make_config(train={"precision": "fp32"})
    manifest = write_as_job(tmp_path, config, whole_state(config), max_item_bytes=1024)
    found = rank_pool.run(load_on_rank, layout.world_size, layout, tmp_path, manifest, config)

    assert [differing for _, differing in found] == [[]] * layout.world_size
    directory = LocalLocation(tmp_path)
    tensors = read_index(checked_index(directory, manifest), directory, manifest).tensors
    assert sum(report.num_items for report, _ in found) == sum(len(one.items) for one in tensors.values())
