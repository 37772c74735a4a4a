"""On a GPU each group's stream has its priority; elsewhere nobody is told of streams."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatrain.comm import group_creation, priorities
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
    create = c10d._new_process_group_helper

    def noting(
        size: int, index: int, ranks: list[int], backend: str, *place: Any, backend_options: Any, **more: Any
    ) -> Any:
        told[more["group_desc"]] = backend_options
        return create(size, index, ranks, dist.Backend("fake"), *place, **{**more, "device_id": None})

    layout = Layout(tp_size=2, pp_size=2, dp_size=2)
    join_fake(0, layout.world_size)
    monkeypatch.setattr(priorities.dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(c10d, "_new_process_group_helper", noting)
    monkeypatch.setattr(group_creation, "_await_members", lambda *_: None)
    monkeypatch.setattr(dist, "get_backend", lambda: "unconnected")
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
