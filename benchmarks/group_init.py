"""Seconds until the first finished collective on every group of every rank, and the requests to the store.

Real processes run four sides in turn: megatrain's; torch's default, where every rank calls new_group for every group
of the layout in the same order; torch's use_local_synchronization, where a rank calls it for its own groups only; and
the default with torch's barrier after each group. A model extends the counted requests to larger worlds.
Run alone on the machine: python -m benchmarks group_init [--processes N] [--rounds N] [--write]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import distributed as dist

from benchmarks.bars import at_least
from benchmarks.group_init_ranks import OURS, SIDES, GroupInitOrders, GroupInitRecord, create_all, load_store
from benchmarks.group_init_requests import Costs, Requests, busy_s, group_requests, nccl_requests, world_requests
from benchmarks.result import Result
from megatrain.contracts.layout import STAGES, Layout
from tests.helpers.rank_pool import RankPool

MEASURED = (
    Layout(tp_size=2, pp_size=2, dp_size=2),
    Layout(tp_size=2, pp_size=4, dp_size=2),
    Layout(tp_size=2, pp_size=4, dp_size=4),
    Layout(tp_size=2, pp_size=8, dp_size=8),
)
MODELED = (
    Layout(tp_size=8, pp_size=8, dp_size=16),
    Layout(tp_size=8, pp_size=8, dp_size=32),
    Layout(tp_size=8, pp_size=8, dp_size=64),
    Layout(tp_size=8, pp_size=8, dp_size=192),
)
NUM_CLIENTS, NUM_REQUESTS, FEW_KEYS, MANY_KEYS = 2, 1000, 2, 128
_TIMEOUT_S = 300.0

Row = dict[str, Any]


@dataclass(slots=True)
class Turns:
    """The results of a side in a layout: its seconds and the server thread's seconds, one value for each round; its
    counted requests.
    """

    seconds: list[float]
    busy_s: list[float]
    groups: Requests
    world: Requests


def run(num_processes: int = 128, num_rounds: int = 5) -> Result:
    """Measure each side `num_rounds` times in each layout of up to `num_processes` ranks."""
    layouts = [layout for layout in MEASURED if layout.world_size <= num_processes]
    if not layouts:
        raise ValueError(f"--processes={num_processes}: the smallest layout has {MEASURED[0].world_size} ranks")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rows: list[Row] = []
    with RankPool(layouts[-1].world_size) as pool:
        costs = _costs(pool, server)
        for layout in layouts:
            turns = _take_turns(pool, server, layout, num_rounds)
            rows += [_measured(layout, side, turns, costs) for side in SIDES]
    for layout in MODELED:
        rows += [_modeled(layout, side, costs) for side in SIDES]
    options = "" if num_processes == 128 else f" --processes {num_processes}"
    return Result(
        name="group-init",
        title="Creation of all groups: seconds, and requests to the store",
        command=f"python -m benchmarks group_init{options} --write",
        rows=rows,
        notes=_notes(num_rounds, costs),
        settings={"rounds": num_rounds, "backend": "gloo", "store": "one TCPStore (libuv) on this machine"},
        bars=[
            at_least(f"{row['ranks']} ranks, {row['side']}: seconds / ours", row["times ours"], 1.0)
            for row in rows
            if row["side"] != "ours" and row["times ours"]
        ],
    )


def _take_turns(pool: RankPool, server: dist.TCPStore, layout: Layout, num_rounds: int) -> Mapping[str, Turns]:
    """Count the requests of each side once, which is also the warm-up; then time the sides in alternating order."""
    turns: dict[str, Turns] = {}
    for side in SIDES:
        records, _ = _create(pool, server, layout, side, "counted", is_counted=True)
        most = max(records, key=lambda record: record.group_requests.total())
        turns[side] = Turns([], [], most.group_requests, most.world_requests)
    for number in range(num_rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            records, server_s = _create(pool, server, layout, side, str(number))
            turns[side].seconds.append(seconds_of(records))
            turns[side].busy_s.append(server_s)
    return turns


def _create(
    pool: RankPool, server: dist.TCPStore, layout: Layout, side: str, name: str, *, is_counted: bool = False
) -> tuple[list[GroupInitRecord], float]:
    """Let all ranks create their groups. Return their records, and the seconds of the server's thread."""
    orders = GroupInitOrders(side, layout, server.port, f"{layout}/{side}/{name}", is_counted)
    busy = _others_s()
    records: list[GroupInitRecord] = pool.run(create_all, layout.world_size, orders, timeout_s=_TIMEOUT_S)
    busy = _others_s() - busy
    wrong = {name: sums for record in records for name, sums in record.sums.items() if sums[0] != sums[1]}
    if wrong:
        raise RuntimeError(f"{side}, {layout}: sums that are not the number of members: {wrong}")
    return records, busy


def seconds_of(records: list[GroupInitRecord]) -> float:
    """Return the seconds from when the last rank began until the last rank had a result from each of its groups."""
    return max(record.ended_s for record in records) - max(record.began_s for record in records)


def _others_s() -> float:
    """Return the processor seconds of this process except those of the calling thread: the server's."""
    return time.process_time() - time.thread_time()


def _costs(pool: RankPool, server: dist.TCPStore) -> Costs:
    """Measure the cost of each kind of request for the server's thread, with a few clients."""

    def each_s(kind: str, num_keys: int) -> float:
        busy = _others_s()
        pool.run(load_store, NUM_CLIENTS, server.port, kind, num_keys, NUM_REQUESTS, timeout_s=_TIMEOUT_S)
        return (_others_s() - busy) / (NUM_CLIENTS * NUM_REQUESTS)

    few_s, many_s = each_s("multi_get", FEW_KEYS), each_s("multi_get", MANY_KEYS)
    key_s = (many_s - few_s) / (MANY_KEYS - FEW_KEYS)
    by_kind = {kind: each_s(kind, 1) for kind in ("set", "get", "add", "wait")}
    return Costs({**by_kind, "multi_get": few_s - FEW_KEYS * key_s}, key_s)


def _measured(layout: Layout, side: str, turns: Mapping[str, Turns], costs: Costs) -> Row:
    own, ours = turns[side], turns[OURS]
    ratio = statistics.median(second / other for second, other in zip(own.seconds, ours.seconds, strict=True))
    return {
        **_row(layout, side, own.groups, own.world, costs),
        "seconds": statistics.median(own.seconds),
        "fastest": min(own.seconds),
        "slowest": max(own.seconds),
        "times ours": ratio,
        "store busy, s": statistics.median(own.busy_s),
    }


def _modeled(layout: Layout, side: str, costs: Costs) -> Row:
    return _row(layout, side, group_requests(side, layout, 0), world_requests(side, layout, 0), costs)


def _row(layout: Layout, side: str, groups: Requests, world: Requests, costs: Costs) -> Row:
    return {
        "ranks": layout.world_size,
        "layout": layout.sizes_text,
        "side": side,
        "seconds": "not measured",
        "fastest": "",
        "slowest": "",
        "times ours": "",
        "requests of a rank for its groups": groups.total(),
        "by kind": in_words(groups),
        "for the world group": world.total(),
        "store busy, s": "",
        "by the model, s": sum(busy_s(side, layout, costs)),
    }


def in_words(requests: Requests) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(requests.items()) if count)


def _notes(num_rounds: int, costs: Costs) -> list[str]:
    largest = MODELED[-1]
    each = ", ".join(f"{kind} {seconds * 1e6:.1f}" for kind, seconds in costs.by_kind.items())
    at_ends = [in_words(nccl_requests(largest, rank)) for rank in (0, largest.stride(STAGES))]
    return [
        f"seconds: median of {num_rounds} rounds, from when all processes are there and connected to the store",
        "a time ends when the last process has a sum from each of its groups; times ours: median of the rounds' ratios",
        "all sides create a group along each axis, the same on host memory, two links and the tied embedding's group",
        "torch's sides create a group of the world too, on which no collective is timed",
        "use_local_synchronization: groups of kinds that not every rank has come last; elsewhere torch waits for ever",
        "requests: of the rank with the most, counted at the store object in a separate round",
        "one get is two messages to the server (a wait and a get), as is one multi_get of up to 128 keys",
        "store busy: processor time of the server's thread; by the model: requests times the cost of each here",
        f"cost of a request in us, of {NUM_CLIENTS} clients: {each}, and {costs.key_s * 1e6:.2f} a key of multi_get",
        "connections and threads are not in the model: it shows when all ranks wait for the store",
        f"with NCCL (not measured), of {largest.world_size:,} ranks: rank 0 sends {at_ends[0]}",
        f"with NCCL (not measured), of {largest.world_size:,} ranks: one of the second stage sends {at_ends[1]}",
    ]
