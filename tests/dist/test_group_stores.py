"""Groups connect through stores that ranks serve; the job's own store holds only the addresses of these stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from megatrain.comm import Mesh, create_mesh, join
from megatrain.comm.gloo import create_process_group
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.group_stores import GroupStores
from megatrain.comm.rendezvous import Rendezvous
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.layout import Layout
from megatrain.contracts.process import Process
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.waiting import DEADLINE_S

LAYOUT = Layout(tp_size=2, pp_size=2, dp_size=2)
PREFIX = "job/7"
DEADLINE = timedelta(seconds=DEADLINE_S)


@dataclass(slots=True)
class Answers:
    sums: dict[str, tuple[int, float]] = field(default_factory=dict)
    error: str = ""


def rendezvous_at(context: RankContext, port: int) -> Rendezvous:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=DEADLINE)
    return Rendezvous(Process(context.rank, context.world_size, init_method=context.init_method), store, PREFIX)


def mesh_of(rendezvous: Rendezvous, ranks_per_store: int) -> Mesh:
    join(rendezvous)
    stores = GroupStores(rendezvous, ranks_per_store=ranks_per_store, timeout_s=DEADLINE_S)
    recorder = Recorder(BlackBoxWriter.anonymous())
    return create_mesh(
        LAYOUT, rendezvous.process.rank, torch.device("cpu"), recorder, stores=stores, timeout_s=DEADLINE_S
    )


def sum_in_all_groups(context: RankContext, port: int, ranks_per_store: int) -> Answers:
    mesh, answers = mesh_of(rendezvous_at(context, port), ranks_per_store), Answers()
    for group in mesh.groups:
        pending = group.all_reduce(torch.ones(1), Operation.CHECKPOINT_EXCHANGE)
        answers.sums[group.name] = (group.size, pending.wait().item())
    assert mesh.stores is not None
    for number in range(LAYOUT.world_size):  # at any store, because all of them still exist
        planned = PlannedGroup(f"late-{number}", tuple(range(LAYOUT.world_size)))
        create_process_group(planned, mesh.rank, mesh.stores.of(planned), DEADLINE)
    mesh.barrier()  # A store ends with the rank that serves it.
    return answers


@pytest.mark.slow(kept=["3-3"])
@pytest.mark.parametrize(("ranks_per_store", "num_stores"), [(8, 1), (3, 3)])
def test_all_groups_rendezvous_at_their_stores(rank_pool: RankPool, ranks_per_store: int, num_stores: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = rank_pool.run(sum_in_all_groups, LAYOUT.world_size, server.port, ranks_per_store)
    for answer in answers:
        assert len(answer.sums) == 9
        assert all(size == total for size, total in answer.sums.values())
    addresses = [f"{PREFIX}/group-stores/{number}" for number in range(num_stores)]
    places = [f"{PREFIX}/tp-{rank}//cpu//0/0" for rank in range(0, 8, 2)]
    if num_stores == 1:
        assert not server.check(addresses)
        assert server.check(places)
    else:
        assert server.check(addresses)
        assert server.num_keys() == len(addresses), "no group connects at the job's own store"


def come_without_rank_4(context: RankContext, port: int) -> str:
    rendezvous = rendezvous_at(context, port)
    text = ""
    if context.rank != 4:
        join(rendezvous)
        stores = GroupStores(rendezvous, ranks_per_store=4, timeout_s=1)
        recorder = Recorder(BlackBoxWriter.anonymous())
        with pytest.raises(CommunicationError) as caught:
            create_mesh(LAYOUT, context.rank, torch.device("cpu"), recorder, stores=stores, timeout_s=1)
        text = str(caught.value)
    rendezvous.store.set(f"seen-{context.rank}", b"1")
    rendezvous.store.wait([f"seen-{rank}" for rank in range(8)], DEADLINE)
    return text


@pytest.mark.slow
def test_missing_rank_that_serves_a_store_is_named(rank_pool: RankPool) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    errors = rank_pool.run(come_without_rank_4, LAYOUT.world_size, server.port)
    needing = [
        error for error in errors if "the store that rank 4 serves for groups (runtime.ranks_per_store)" in error
    ]
    assert needing
    assert all(error.startswith("rank ") for rank, error in enumerate(errors) if rank != 4)
