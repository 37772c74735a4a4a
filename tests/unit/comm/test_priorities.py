"""On a GPU each group's stream has its priority; elsewhere nobody is told of streams."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.comm import mesh as mesh_module
from megatrain.comm import priorities
from megatrain.comm.mesh import create_mesh
from megatrain.comm.process import join_fake, leave
from megatrain.contracts.layout import Layout
from tests.helpers.lone_rank import SilentRecorder


class Options:
    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_groups_are_created_with_their_priority(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    new_group = mesh_module.dist.new_group

    def noting(ranks: list[int], *, pg_options: Any, group_desc: str, **more: Any) -> Any:
        told[group_desc] = pg_options
        return new_group(ranks, group_desc=group_desc, **{**more, "backend": None})

    monkeypatch.setattr(priorities.dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(mesh_module.dist, "new_group", noting)
    layout = Layout(tp_size=2, pp_size=2, dp_size=2)
    join_fake(0, layout.world_size)
    try:
        create_mesh(layout, 0, torch.device(device), SilentRecorder(), timeout_s=7.0)
    finally:
        leave()

    on_host = {"host-tp", "host-pp", "host-dp"}
    assert told.keys() == {"tp", "dp", "pp", "embedding", "pp-forward", "pp-backward"} | on_host
    if device == "cpu":
        assert set(told.values()) == {None}
        return
    assert {told.pop(name) for name in on_host} == {None}, "gloo's"
    assert [name for name, options in told.items() if not options.is_high_priority_stream] == ["dp"]
    assert {options._timeout for options in told.values()} == {timedelta(seconds=7)}
