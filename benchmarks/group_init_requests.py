"""How many requests the ranks send to the store to create their groups, and how long these keep its one thread busy.

Pure functions of the layout, checked against counted requests. With gloo, each member writes its address and reads
those of all members, including itself: torch uses two requests for each member (wait, get), megatrain one for 128
members. With torch's barrier after a creation, ALL ranks pass a barrier for EVERY group of the world, members or not.
With NCCL, the first of every 128 members writes an identity, and all members read all identities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.group_init_ranks import OURS, TORCH_BARRIER
from megatrain.comm.group_plan import PlannedGroup, all_planned_groups, planned_groups
from megatrain.contracts.layout import Layout

KEYS_A_REQUEST = 128
"""The number of addresses that gloo reads in one request. NCCL's number of ranks for each root is the same."""

Requests = Counter[str]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the server's thread. `by_kind`: of one request (`multi_get`: without its keys); `key_s`: of a key."""

    by_kind: dict[str, float]
    key_s: float

    def of(self, requests: Requests, num_keys: int = 0) -> float:
        """Return the cost of requests. `num_keys`: the number of keys of all requests of kind `multi_get` together."""
        return sum(self.by_kind[kind] * count for kind, count in requests.items()) + self.key_s * num_keys


def group_requests(side: str, layout: Layout, rank: int) -> Requests:
    """Return the requests of a rank for all groups except that of the world.

    The `set` of a barrier is counted once, for rank 0. The rank that sees itself as the last sends it; sometimes
    several ranks do.
    """
    requests = _sum(_gloo(side, len(planned.ranks)) for planned in _own(layout, rank))
    if side == TORCH_BARRIER:
        requests += _barriers(sum(1 for _ in all_planned_groups(layout)), rank)
    return requests


def world_requests(side: str, layout: Layout, rank: int) -> Requests:
    """Return the requests of a rank for the group of the world. megatrain's side does not connect that group."""
    if side == OURS:
        return Counter()
    return _gloo(side, layout.world_size) + (_barriers(1, rank) if side == TORCH_BARRIER else Counter())


def nccl_requests(layout: Layout, rank: int) -> Requests:
    """Return the requests of a rank on GPUs on megatrain's side, including those of links at their first messages."""
    return _sum(_nccl(planned, rank) for planned in _own(layout, rank))


def busy_s(side: str, layout: Layout, costs: Costs) -> tuple[float, float]:
    """Return for how many seconds the groups, and the world group, keep the one thread of a store busy."""
    groups_s, num_groups = 0.0, 0
    for planned in all_planned_groups(layout):
        groups_s += len(planned.ranks) * _member_s(side, len(planned.ranks), costs)
        num_groups += 1
    size = layout.world_size
    world_s = 0.0 if side == OURS else size * _member_s(side, size, costs)
    if side == TORCH_BARRIER:
        barrier_s = size * costs.of(Counter(add=2, wait=1)) + costs.of(Counter(set=1))
        groups_s += num_groups * barrier_s
        world_s += barrier_s
    return groups_s, world_s


def _own(layout: Layout, rank: int) -> list[PlannedGroup]:
    return [planned for planned in planned_groups(layout, rank) if len(planned.ranks) > 1]


def _member_s(side: str, size: int, costs: Costs) -> float:
    return costs.of(_gloo(side, size), num_keys=size if side == OURS else 0)


def _gloo(side: str, size: int) -> Requests:
    if side == OURS:
        return Counter(set=1, multi_get=-(-size // KEYS_A_REQUEST))
    return Counter(set=1, wait=size, get=size)


def _barriers(num_groups: int, rank: int) -> Requests:
    return Counter(add=2 * num_groups, wait=num_groups, set=num_groups if rank == 0 else 0)


def _nccl(planned: PlannedGroup, rank: int) -> Requests:
    size, index = len(planned.ranks), planned.ranks.index(rank)
    if planned.uses_cpu_memory:
        return _gloo(OURS, size)
    if planned.is_link:
        # both ends meet and get a communicator: the lower rank writes its identity, and the other one reads it
        num_neighbors = int(index < size - 1) + int(index > 0)
        return Counter(set=num_neighbors + int(index < size - 1), get=int(index > 0), wait=num_neighbors)
    arrival = Counter(set=1, wait=1)
    if size <= KEYS_A_REQUEST:
        return arrival + Counter(set=int(index == 0), get=int(index > 0))
    return arrival + Counter(set=int(index % KEYS_A_REQUEST == 0), multi_get=1)


def _sum(counters: Iterable[Requests]) -> Requests:
    total: Requests = Counter()
    for counter in counters:
        total += counter
    return total
