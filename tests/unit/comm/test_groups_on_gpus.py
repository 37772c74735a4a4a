"""What is asked of torch for groups on GPUs, as far as a machine without one can tell."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatrain.comm.group_creation import create_process_group
from megatrain.comm.group_plan import PlannedGroup, planned_groups
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.layout import Layout

GPU = torch.device("cuda", 1)
TIMEOUT_S = 20.0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return what the creations asked for: name, members' backend, and the device to connect at once."""
    found: list[tuple[Any, ...]] = []

    def create(*args: Any, device_id: torch.device | None, group_desc: str, **options: Any) -> tuple[object, None]:
        size, index, ranks, backend, _, key = args
        assert (size, ranks[index]) == (len(ranks), min(ranks)), "this test is rank 0 of its groups"
        found.append((group_desc, key, str(backend), device_id))
        return object(), None

    monkeypatch.setattr(dist, "get_backend", lambda: "unconnected")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(c10d, "_new_process_group_helper", create)
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    return found


def test_who_is_connected_by_what_and_when(asked: list[tuple[Any, ...]]) -> None:
    store = dist.HashStore()
    for planned in planned_groups(Layout(pp_size=2), 0):
        if len(planned.ranks) > 1:
            store.set(f"{planned.key}/arrived/1", b"1")
            create_process_group(planned, 0, GPU, store, timeout_s=TIMEOUT_S)
    assert asked == [
        ("pp", "pp-0", "nccl", GPU),
        ("host-pp", "host-pp-0", "gloo", None),
        ("embedding", "embedding-0", "nccl", GPU),
        # each pair of stages connects at its first message
        ("pp-forward", "pp-forward-0", "nccl", None),
        ("pp-backward", "pp-backward-0", "nccl", None),
    ]


def test_nccl_is_not_entered_before_all_members_are_there(asked: list[tuple[Any, ...]]) -> None:
    store, planned = dist.HashStore(), PlannedGroup("dp", (0, 3, 6))
    store.set("dp-0/arrived/1", b"1")
    with ThreadPoolExecutor(1) as pool:
        creation = pool.submit(create_process_group, planned, 0, GPU, store, timeout_s=TIMEOUT_S)
        store.wait(["dp-0/arrived/0"], timedelta(seconds=5))
        assert not asked
        store.set("dp-0/arrived/2", b"1")
        creation.result(TIMEOUT_S)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("arrived", "named"), [((), "ranks 3, 6"), ((1,), "rank 6"), ((1, 2), "all of them have come, and one cannot")]
)
def test_who_does_not_come_is_named(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, arrived: tuple[int, ...], named: str
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(c10d, "_new_process_group_helper", fail)
    store = dist.HashStore()
    for index in arrived:
        store.set(f"dp-0/arrived/{index}", b"1")
    with pytest.raises(CommunicationError, match=f"rank 0 could not create group dp of ranks 0, 3, 6 .*{named}"):
        create_process_group(PlannedGroup("dp", (0, 3, 6)), 0, GPU, store, timeout_s=0.05)


def test_a_store_that_is_gone_too_is_said(asked: list[tuple[Any, ...]]) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with pytest.raises(CommunicationError, match="one of them is missing or stuck, and the store does not answer"):
        create_process_group(PlannedGroup("dp", (0, 3)), 0, GPU, store, timeout_s=TIMEOUT_S)
