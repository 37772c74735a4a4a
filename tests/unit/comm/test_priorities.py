"""On a GPU each group's stream has its priority; elsewhere no stream options are passed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatrain.comm import group_creation, mesh, priorities
from megatrain.comm.mesh import create_mesh
from megatrain.comm.process import join_fake, leave
from megatrain.contracts.layout import AXES, Layout
from tests.helpers.lone_rank import SilentRecorder

LAYOUT = Layout(tp_size=2, pp_size=2, dp_size=2)


class Options:
    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return the options that torch gets for each group, without creating one; and that links were warmed up."""
    told: dict[str, Any] = {}
    create = c10d._new_process_group_helper

    def noting(
        size: int, index: int, ranks: list[int], backend: str, *place: Any, backend_options: Any, **more: Any
    ) -> Any:
        told[more["group_desc"]] = backend_options
        return create(size, index, ranks, dist.Backend("fake"), *place, **{**more, "device_id": None})

    join_fake(0, LAYOUT.world_size)
    monkeypatch.setattr(priorities.dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(c10d, "_new_process_group_helper", noting)
    monkeypatch.setattr(group_creation, "_await_members", lambda *_: None)
    monkeypatch.setattr(dist, "get_backend", lambda: "unconnected")
    monkeypatch.setattr(mesh, "warm_up", lambda *_, **__: told.setdefault("links"))
    yield told
    leave()


@pytest.mark.parametrize(
    ("layout", "device", "is_warmed_up"),
    [
        (Layout(dp_size=8), "cuda", False),  # a stage that is alone with its chunks hands over in memory
        (LAYOUT, "cpu", False),  # gloo connects when a group is created
        (LAYOUT, "cuda", True),
    ],
)
def test_links_are_warmed_up(layout: Layout, device: str, is_warmed_up: bool, told: dict[str, Any]) -> None:
    create_mesh(layout, 0, torch.device(device), SilentRecorder(), has_wrap_links=True)

    assert ("links" in told) is is_warmed_up


def test_what_travels_between_replicas_yields() -> None:
    assert [axis.name for axis in AXES if not priorities.is_urgent(axis.name)] == ["dp", "edp"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_groups_are_created_with_their_priority(device: str, told: dict[str, Any]) -> None:
    create_mesh(LAYOUT, 0, torch.device(device), SilentRecorder(), timeout_s=7.0)

    told.pop("links", None)
    on_host = {"host-tp", "host-pp", "host-dp"}
    assert told.keys() == {"tp", "dp", "pp", "embedding", "pp-forward", "pp-backward"} | on_host
    if device == "cpu":
        assert set(told.values()) == {None}
        return
    assert {told.pop(name) for name in on_host} == {None}, "gloo's"
    assert [name for name, options in told.items() if not options.is_high_priority_stream] == ["dp"]
    assert {options._timeout for options in told.values()} == {timedelta(seconds=7)}
