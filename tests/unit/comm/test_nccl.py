"""The calls to torch that create groups on GPUs, as far as a machine without a GPU can check them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatrain.comm import mesh, nccl
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.mesh import create_mesh
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.layout import Layout
from tests.helpers.single_rank import SilentRecorder
from tests.helpers.waiting import DEADLINE_S

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
TIMEOUT = timedelta(seconds=DEADLINE_S)
CUBE = Layout(tp_size=2, pp_size=2, dp_size=2)


class Options:
    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


@dataclass
class Asked:
    """The requests, in order."""

    groups: list[tuple[str, str, str, torch.device | None]]
    """Name, key at the store, library, and the device to connect at once."""
    options: dict[str, Any]
    num_warm_ups: int = 0

    def warm_up(self, *_: object, **__: object) -> None:
        self.num_warm_ups += 1


class EverybodysStores:
    """Stores that all members of a group have reached."""

    def of(self, planned: PlannedGroup) -> dist.Store:
        store = dist.HashStore()
        for index in range(len(planned.ranks)):
            store.set(f"{planned.key}/arrived/{index}", b"1")
        return store


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return the requests to torch, which creates no group, and to links, which transfer nothing."""
    found = Asked([], {})

    def create(
        size: int, index: int, ranks: list[int], backend: str, _: dist.Store, key: str, **more: Any
    ) -> tuple[dist.ProcessGroup, None]:
        assert (size, ranks[index]) == (len(ranks), min(ranks)), "this test is rank 0 of its groups"
        name = more["group_desc"]
        found.groups.append((name, str(key), str(backend), more["device_id"]))
        found.options[name] = more["backend_options"]
        return dist.ProcessGroup(index, size), None

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(c10d, "_new_process_group_helper", create)
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    monkeypatch.setattr(mesh, "warm_up", found.warm_up)
    return found


def ask_for_mesh(layout: Layout, device: torch.device, *, has_wrap_links: bool = False) -> None:
    stores: Any = EverybodysStores()
    create_mesh(layout, 0, device, SilentRecorder(), stores=stores, has_wrap_links=has_wrap_links, timeout_s=7.0)


def test_connections_of_groups_and_links(asked: Asked) -> None:
    ask_for_mesh(Layout(pp_size=2), GPU)

    assert asked.groups == [
        ("pp", "pp-0", "nccl", GPU),
        ("host-pp", "host-pp-0", "gloo", None),
        ("embedding", "embedding-0", "nccl", GPU),
        # each pair of stages connects at its first message
        ("pp-forward", "pp-forward-0", "nccl", None),
        ("pp-backward", "pp-backward-0", "nccl", None),
    ]


@pytest.mark.parametrize(
    ("layout", "device", "num_warm_ups"),
    [
        (Layout(dp_size=8), GPU, 0),  # the chunks of a single stage pass activations in memory
        (CUBE, CPU, 0),  # gloo connects when a group is created
        (CUBE, GPU, 1),
    ],
)
def test_links_are_warmed_up(layout: Layout, device: torch.device, num_warm_ups: int, asked: Asked) -> None:
    ask_for_mesh(layout, device, has_wrap_links=True)

    assert asked.num_warm_ups == num_warm_ups


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (CUBE, ["dp"]),
        (Layout(cp_size=2, tp_size=2), ["cp"]),
        (Layout(dp_size=2, cp_size=2), ["dp", "dp-cp"]),
        (Layout(dp_size=4, cp_size=2, ep_size=2), ["dp", "edp", "dp-cp"]),
    ],
    ids=str,
)
def test_replica_exchanges_have_lower_priority(layout: Layout, names: list[str], asked: Asked) -> None:
    """If dp has one rank, the replicas are along cp; otherwise tokens that are exchanged along cp are urgent."""
    ask_for_mesh(layout, GPU)

    options = {name: given for name, given in asked.options.items() if given is not None}
    assert [name for name, given in options.items() if not given.is_high_priority_stream] == names


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_groups_are_created_with_their_priority(device: torch.device, asked: Asked) -> None:
    ask_for_mesh(CUBE, device)

    options, on_host = asked.options, {"host-tp", "host-pp", "host-dp"}
    assert options.keys() == {"tp", "dp", "pp", "embedding", "pp-forward", "pp-backward"} | on_host
    if device == CPU:
        assert set(options.values()) == {None}
        return
    assert {options.pop(name) for name in on_host} == {None}, "gloo's"
    assert [name for name, given in options.items() if not given.is_high_priority_stream] == ["dp"]
    assert {given._timeout for given in options.values()} == {timedelta(seconds=7)}


def test_nccl_group_waits_for_all_members(asked: Asked) -> None:
    store, planned = dist.HashStore(), PlannedGroup("dp", (0, 3, 6))
    store.set("dp-0/arrived/1", b"1")
    with ThreadPoolExecutor(1) as pool:
        creation = pool.submit(nccl.create_process_group, planned, 0, GPU, store, TIMEOUT)
        store.wait(["dp-0/arrived/0"], TIMEOUT)
        assert not asked.groups
        store.set("dp-0/arrived/2", b"1")
        creation.result(TIMEOUT.total_seconds())
    assert len(asked.groups) == 1


@pytest.mark.parametrize(
    ("arrived", "named"), [((), "ranks 3, 6"), ((1,), "rank 6"), ((1, 2), "all of them have arrived, but one cannot")]
)
def test_missing_rank_is_named(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, arrived: tuple[int, ...], named: str
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(c10d, "_new_process_group_helper", fail)
    store = dist.HashStore()
    for index in arrived:
        store.set(f"dp-0/arrived/{index}", b"1")
    with pytest.raises(CommunicationError, match=f"rank 0 could not create group dp of ranks 0, 3, 6 .*{named}"):
        nccl.create_process_group(PlannedGroup("dp", (0, 3, 6)), 0, GPU, store, timedelta(seconds=0.05))


def test_lost_store_is_reported_too(asked: Asked) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with pytest.raises(CommunicationError, match="one of them is missing or stuck, and the store does not answer"):
        nccl.create_process_group(PlannedGroup("dp", (0, 3)), 0, GPU, store, TIMEOUT)
