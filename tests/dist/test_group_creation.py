"""Only the members of a group create it, under its own name; errors name missing ranks."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from megatrain.comm import create_mesh, join, open_rendezvous
from megatrain.comm.gloo import create_process_group
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.link_warmup import warm_up
from megatrain.comm.rendezvous import Rendezvous
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.layout import Layout
from megatrain.contracts.process import Process
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.waiting import DEADLINE_S

CPU = torch.device("cpu")
TIMEOUT_S = 1.0
"""The timeout of a rank that waits for an absent rank."""
DEADLINE = timedelta(seconds=DEADLINE_S)


def come(context: RankContext, port: int = 0) -> Rendezvous:
    """Join at a store that is a file or, as in a job, a server on this machine."""
    process = Process(context.rank, context.world_size, init_method=context.init_method)
    if port:
        # also the time that a rank waits at the store for an absent rank
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        rendezvous = Rendezvous(process, store, context.init_method)
    else:
        opened = open_rendezvous(process, job="creation", timeout_s=DEADLINE_S)
        assert opened is not None
        rendezvous = opened
    join(rendezvous)
    return rendezvous


def create(planned: PlannedGroup, rendezvous: Rendezvous, timeout_s: float = DEADLINE_S) -> dist.ProcessGroup:
    store = dist.PrefixStore(rendezvous.prefix, rendezvous.store)
    return create_process_group(planned, rendezvous.process.rank, store, timedelta(seconds=timeout_s))


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def groups_of_unequal_ranks(context: RankContext, port: int) -> list[float]:
    """Create three groups with rank 0 before the group of all ranks, two with rank 1, and one with rank 2."""
    rendezvous = come(context, port)
    pairs = [PlannedGroup("one", (0, 1)), PlannedGroup("two", (0, 1)), PlannedGroup("three", (0, 2))]
    sums = []
    for planned in (*pairs, PlannedGroup("all", (0, 1, 2))):
        if context.rank in planned.ranks:
            x = torch.tensor([10.0**context.rank])
            dist.all_reduce(x, group=create(planned, rendezvous))
            sums.append(x.item())
    return sums


@pytest.mark.parametrize("is_server", [True, False])
def test_ranks_may_have_created_different_numbers_of_groups(
    rank_pool: RankPool, server: dist.TCPStore, is_server: bool
) -> None:
    sums = rank_pool.run(groups_of_unequal_ranks, 3, server.port if is_server else 0)
    assert sums == [
        [11.0, 11.0, 101.0, 111.0],
        [11.0, 11.0, 111.0],
        [101.0, 111.0],
    ]


def talk_to_the_world(context: RankContext) -> str:
    come(context)
    assert (dist.get_rank(), dist.get_world_size()) == (context.rank, context.world_size)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_collective_on_the_world_reports_no_backend(rank_pool: RankPool) -> None:
    for error in rank_pool.run(talk_to_the_world, 2):
        assert "No backend" in error


def wait_for_one_that_never_comes(context: RankContext, absent: tuple[int, ...], size: int, port: int) -> str:
    """Return the error of a present rank."""
    rendezvous = come(context, port)
    store = rendezvous.store
    all_ranks = range(size)
    store.set(f"here-{context.rank}", b"1")
    store.wait([f"here-{rank}" for rank in all_ranks], DEADLINE)
    text = ""
    if context.rank not in absent:
        with pytest.raises(CommunicationError) as caught:
            create(PlannedGroup("dp", tuple(all_ranks)), rendezvous, TIMEOUT_S)
        text = str(caught.value)
    store.set(f"seen-{context.rank}", b"1")
    # No rank exits before all have seen the error: an absent rank is alive, but elsewhere.
    store.wait([f"seen-{rank}" for rank in all_ranks], DEADLINE)
    return text


@pytest.mark.slow(kept=["absent0-rank 2"])
@pytest.mark.parametrize(("absent", "named"), [((2,), "rank 2"), ((0, 3), "ranks 0, 3"), ((1, 2, 3), "ranks 1-3")])
def test_missing_rank_is_named(rank_pool: RankPool, server: dist.TCPStore, absent: tuple[int, ...], named: str) -> None:
    for rank, error in enumerate(rank_pool.run(wait_for_one_that_never_comes, 4, absent, 4, server.port)):
        if rank not in absent:
            assert error.startswith(
                f"rank {rank} could not create group dp of ranks 0-3 within runtime.init_timeout_s=1; "
                f"no sign of {named}: "
            )


def only_half_of_a_mesh(context: RankContext) -> str:
    """Run without rank 3: rank 2 waits for it in tp, and the others wait for rank 2, directly or indirectly."""
    rendezvous = come(context)
    if context.rank == 3:
        rendezvous.store.wait([f"seen-{rank}" for rank in range(3)], DEADLINE)
        return ""
    recorder = Recorder(BlackBoxWriter.anonymous())
    with pytest.raises(CommunicationError) as caught:
        create_mesh(Layout(tp_size=2, dp_size=2), context.rank, CPU, recorder, timeout_s=TIMEOUT_S)
    rendezvous.store.set(f"seen-{context.rank}", b"1")
    return str(caught.value)


@pytest.mark.slow
def test_each_rank_of_a_mesh_names_the_rank_that_it_awaits(rank_pool: RankPool) -> None:
    errors = rank_pool.run(only_half_of_a_mesh, 4)
    assert "rank 2 could not create group tp of ranks 2-3" in errors[2]
    assert "no sign of rank 3:" in errors[2]
    assert "rank 0 could not create group dp of ranks 0, 2" in errors[0]
    assert "no sign of rank 2:" in errors[0]
    assert "rank 1 could not create group dp of ranks 1, 3" in errors[1]
    assert "no sign of rank 3:" in errors[1]


def say_hello_to_neighbors(context: RankContext, layout: Layout, has_wrap_links: bool) -> list[str]:
    """Return the operations that this rank's links exchanged."""
    rendezvous = come(context)
    noted: list[str] = []
    mesh = create_mesh(
        layout,
        context.rank,
        CPU,
        Recorder(BlackBoxWriter.anonymous()),
        has_wrap_links=has_wrap_links,
        before_exchange=lambda exchange: noted.append(exchange.operation.value),
    )
    assert mesh.links is not None
    store = dist.PrefixStore(rendezvous.prefix, rendezvous.store)
    warm_up(mesh.links, mesh.stage, layout.pp_size, CPU, lambda group: store, has_wrap_links=has_wrap_links)
    found = list(noted)
    mesh.barrier()
    return found


@pytest.mark.slow(kept=["2-True", "3-True"])
@pytest.mark.parametrize(("pp_size", "has_wrap_links"), [(2, False), (2, True), (3, True)])
def test_first_messages_go_over_every_link(rank_pool: RankPool, pp_size: int, has_wrap_links: bool) -> None:
    found = rank_pool.run(say_hello_to_neighbors, pp_size, Layout(pp_size=pp_size), has_wrap_links)

    num_links = pp_size if has_wrap_links else pp_size - 1
    counts = Counter(operation for rank in found for operation in rank)
    kinds = ("forward-send", "forward-recv", "backward-send", "backward-recv")
    assert counts == dict.fromkeys(kinds, num_links)


def come_to_links_alone(context: RankContext) -> str:
    """Return the error of stage 0, which waits for the first message of stage 1. Stage 1 never sends one."""
    rendezvous = come(context)
    layout = Layout(pp_size=2)
    mesh = create_mesh(layout, context.rank, CPU, Recorder(BlackBoxWriter.anonymous()))
    store = dist.PrefixStore(rendezvous.prefix, rendezvous.store)
    error = ""
    if context.rank == 0:
        assert mesh.links is not None
        mesh.set_timeout(TIMEOUT_S)
        try:
            warm_up(mesh.links, 0, 2, CPU, lambda group: store, has_wrap_links=False)
        except CommunicationError as raised:
            error = str(raised)
        store.set("over", b"1")
    store.wait(["over"], DEADLINE)
    return error


def test_missing_neighbor_of_a_link_is_named(rank_pool: RankPool) -> None:
    error, _ = rank_pool.run(come_to_links_alone, 2)

    assert error.startswith("rank 0 could not open the link pp-forward to rank 1 within runtime.init_timeout_s=1: ")
