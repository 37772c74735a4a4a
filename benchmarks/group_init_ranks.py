"""The ranks of the benchmark of group creation: one function creates all groups in one of four ways."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from megatrain.comm import create_mesh, join
from megatrain.comm.group_plan import PlannedGroup, all_planned_groups
from megatrain.comm.rendezvous import Rendezvous
from megatrain.contracts.layout import Layout
from megatrain.contracts.process import Process
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder
from tests.helpers.rank_protocol import RankContext

OURS, TORCH, TORCH_BARRIER = "ours", "torch", "torch, TORCH_DIST_INIT_BARRIER=1"
TORCH_LOCAL = "torch, use_local_synchronization"
SIDES = (OURS, TORCH, TORCH_LOCAL, TORCH_BARRIER)
_TIMEOUT = timedelta(seconds=300)
_HOST = "127.0.0.1"


class CountingStore(dist.Store):
    """Forwards every request and counts it by kind. Requests from torch's C++ code pass through it too."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self.counts["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.counts["get"] += 1
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        self.counts["add"] += 1
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self.counts["check"] += 1
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = _TIMEOUT) -> None:
        self.counts["wait"] += 1
        self._store.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.counts["multi_get"] += 1
        return self._store.multi_get(keys)

    def has_extended_api(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class GroupInitOrders:
    """One creation of all groups. port: of the store's server on this machine. prefix: of this creation's keys."""

    side: str
    layout: Layout
    port: int
    prefix: str
    is_counted: bool = False


@dataclass(slots=True)
class GroupInitRecord:
    """The measurements of a rank: when it began and when it had a result from each of its groups (monotonic clock),
    its requests for the world group and for all other groups, and by group (members, sum), which must be equal."""

    began_s: float = 0.0
    ended_s: float = 0.0
    world_requests: Counter[str] = field(default_factory=Counter)
    group_requests: Counter[str] = field(default_factory=Counter)
    sums: dict[str, tuple[int, float]] = field(default_factory=dict)


def create_all(context: RankContext, orders: GroupInitOrders) -> GroupInitRecord:
    """Wait for all ranks, create the groups, and run a collective on each."""
    if orders.side == TORCH_BARRIER:
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    everything = list(all_planned_groups(orders.layout))
    # connect before the gate: torch resolves the name of the server's address, and a lost reply costs 5 s
    store: dist.Store = dist.TCPStore(_HOST, orders.port, is_master=False, timeout=_TIMEOUT)
    _pass_gate(store, context.world_size, orders.prefix)
    record = GroupInitRecord(began_s=time.monotonic())
    counts: Counter[str] = Counter()
    if orders.is_counted:
        store = counting = CountingStore(store)
        counts = counting.counts
    if orders.side == OURS:
        process = Process(context.rank, context.world_size, init_method=context.init_method)
        join(Rendezvous(process, store, orders.prefix))
        record.world_requests = Counter(counts)
        mesh = create_mesh(orders.layout, context.rank, torch.device("cpu"), Recorder(BlackBoxWriter.anonymous()))
        groups = [
            (group.name, group.size, group.communicator.process_group)
            for group in mesh.groups
            if group.communicator is not None
        ]
    else:
        inside = dist.PrefixStore(orders.prefix, store)
        dist.init_process_group("gloo", store=inside, rank=context.rank, world_size=context.world_size)
        record.world_requests = Counter(counts)
        is_local = orders.side == TORCH_LOCAL
        created = [
            (planned, dist.new_group(list(planned.ranks), use_local_synchronization=is_local))
            for planned in (_common_first(everything, context.world_size) if is_local else everything)
            if not is_local or context.rank in planned.ranks
        ]
        groups = [(one.name, len(one.ranks), group) for one, group in created if context.rank in one.ranks]
    record.sums = dict(_first_sums(groups))
    record.ended_s = time.monotonic()
    record.group_requests = counts - record.world_requests
    return record


def _common_first(planned: Sequence[PlannedGroup], world_size: int) -> list[PlannedGroup]:
    """Return the groups, last those of kinds that not every rank has.

    With use_local_synchronization, torch names a group by its members and by how many groups a rank has already
    created, so its members must have created equally many. Otherwise they wait for each other forever.
    """
    num_members = Counter({one.name: 0 for one in planned})
    for one in planned:
        num_members[one.name] += len(one.ranks)
    return sorted(planned, key=lambda one: num_members[one.name] < world_size)


def _pass_gate(store: dist.Store, world_size: int, prefix: str) -> None:
    if store.add(f"{prefix}/arrived", 1) == world_size:
        store.set(f"{prefix}/open", "1")
    store.wait([f"{prefix}/open"], _TIMEOUT)


def _first_sums(groups: Iterable[tuple[str, int, Any]]) -> Iterable[tuple[str, tuple[int, float]]]:
    for name, size, group in groups:
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        yield name, (size, x.item())


def load_store(context: RankContext, port: int, kind: str, num_keys: int, num_requests: int) -> float:
    """Set the keys, and then send `num_requests` requests of one kind to the server. Return the seconds of these."""
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=_TIMEOUT)
    keys = [f"{kind}-{num_keys}/{number}" for number in range(num_keys)]
    for key in keys:
        store.set(key, "a" * ADDRESS_BYTES)
    began_s = time.monotonic()
    for _ in range(num_requests):
        if kind == "set":
            store.set(keys[0], "a" * ADDRESS_BYTES)
        elif kind == "get":
            store.get(keys[0])
        elif kind == "add":
            store.add(f"{kind}/count", 1)
        elif kind == "wait":
            store.wait(keys)
        else:
            store.multi_get(keys)
    return time.monotonic() - began_s


ADDRESS_BYTES = 154
"""The bytes that gloo writes for a rank whose host has a short name, and that it reads for each of its peers."""
