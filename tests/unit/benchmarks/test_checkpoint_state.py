"""The state of benchmark `checkpoint` is that of the requesting rank, in any layout."""

from __future__ import annotations

import math
from collections import defaultdict

from benchmarks.checkpoint_state import KINDS, build_state
from benchmarks.memory import with_changes
from megatrain.comm import dry_mesh
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.parallel.boxes import Box


def test_state_of_all_ranks_is_the_whole_state_once() -> None:
    """Each value is saved by one rank; its other holders have it too."""
    layout = Layout(dp_size=2, tp_size=2)
    config = Config.from_dict(with_changes({"model.hidden_size": 32, "model.vocab_size": 64, "parallel.tp_size": 2}))
    boxes: dict[tuple[str, str], list[Box]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(layout.world_size):
        with dry_mesh(layout, rank) as mesh:
            state = build_state(config, mesh, bucket_size=5_000)
        assert state.is_filled()
        for one in state.shards:
            shapes[one.shard.name] = one.shard.global_shape
            if one.shard.holders.index == 0:
                boxes[one.kind, one.shard.name].append(one.shard.box)

    assert boxes.keys() == {(kind, name) for kind in KINDS for name in shapes}
    for (_, name), found in boxes.items():
        assert len(set(found)) == len(found), name
        assert sum(box.numel for box in found) == math.prod(shapes[name]), name
