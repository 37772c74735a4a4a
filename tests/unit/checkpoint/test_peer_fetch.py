"""Snapshots fetched from peers: which host has which, and what a start copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatrain.arena.directory import Arena, create_arena
from megatrain.arena.sealed import sealed_by_rank
from megatrain.arena.slot_file import SlotReader, make_slot
from megatrain.arena.slot_layout import Persist, SealedSnapshot, SlotHeader, SlotState
from megatrain.checkpoint import peer_fetch, snapshot_offer
from megatrain.checkpoint.job_peers import fallback_start
from megatrain.checkpoint.peer_fetch import FetchPlan, adopt, fetch_missing, fetch_snapshot, number_in_same_slot
from megatrain.checkpoint.peers import MemoryPoint, choose_keepers, newest_in_memory, serving_rank
from megatrain.checkpoint.snapshot_offer import SnapshotOffer, SnapshotRequest
from megatrain.checkpoint.start import StartingPoint, StorageCandidate
from megatrain.contracts.errors import CheckpointError, CommunicationError, TopologyError
from megatrain.contracts.layout import Layout
from megatrain.peers.link import PeerAddress, PeerConnection, connect_peer
from tests.helpers.peer_arenas import LIMITS, OWNER, SECRET, PeerHosts, serving, whole_contents
from tests.helpers.single_rank import single_rank_groups

SNAPSHOT = SealedSnapshot(step=10, round=2, snapshot=0)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerHosts:
    monkeypatch.setattr(snapshot_offer, "_BLOCK_BYTES", 100)
    return PeerHosts(tmp_path)


@pytest.fixture
def slot(hosts: PeerHosts) -> Path:
    """An empty slot of the owner on a new host."""
    path = hosts.peer.slot(OWNER, 0)
    digest = bytes.fromhex(hosts.planned.plan_digest)
    make_slot(path, SlotHeader(OWNER, 0, 2, hosts.planned.contents_bytes, digest))
    return path


@pytest.fixture
def address(hosts: PeerHosts) -> Iterator[PeerAddress]:
    with serving(partial(peer_fetch.serve_arena, hosts.own)) as found:
        yield found


def fetch(address: PeerAddress, wanted: SnapshotRequest, slot: Path) -> None:
    with connect_peer(address, SECRET, LIMITS) as connection:
        fetch_snapshot(connection, wanted, slot)


@pytest.mark.parametrize("is_copy", [True, False], ids=["from a copy", "from a slot of a rank that has moved"])
def test_fetched_snapshot_equals_the_sealed_one(
    hosts: PeerHosts, slot: Path, address: PeerAddress, is_copy: bool
) -> None:
    source = hosts.own.slot(OWNER, 0)
    if is_copy:
        source = source.rename(hosts.own.copy(OWNER, 0))
    fetch(address, SnapshotRequest(hosts.planned, SNAPSHOT), slot)
    assert sealed_by_rank(hosts.peer) == {OWNER: [SNAPSHOT]}
    assert whole_contents(slot) == whole_contents(source)
    with SlotReader(slot) as found, SlotReader(source) as expected:
        assert replace(found.words(), persist=Persist.PENDING) == expected.words()
        # The rank that stores it is chosen when all have their snapshots.
        assert found.words().persist == Persist.NONE


def test_snapshot_that_the_host_lacks_is_not_fetched(hosts: PeerHosts, slot: Path, address: PeerAddress) -> None:
    (hosts.own.root / "copy-00007.slot-1").write_bytes(b"damaged")
    for wanted in (
        SnapshotRequest(hosts.planned, replace(SNAPSHOT, snapshot=1)),
        SnapshotRequest(replace(hosts.planned, plan_digest="00" * 32), SNAPSHOT),
        SnapshotRequest(replace(hosts.planned, owner=8), SNAPSHOT),
    ):
        with pytest.raises(CommunicationError, match="the peer closed the connection"):
            fetch(address, wanted, slot)
    assert sealed_by_rank(hosts.peer) == {}


def test_unrequested_snapshot_is_not_taken(hosts: PeerHosts, slot: Path) -> None:
    with SlotReader(hosts.own.slot(OWNER, 0)) as reader:
        offer = SnapshotOffer.of_slot(reader)
    assert offer is not None
    before = slot.read_bytes()
    for change in ({"contents_bytes": 10**15}, {"owner": 8}, {"snapshot": 1}):

        def offer_another(connection: PeerConnection, change: dict[str, int] = change) -> None:
            connection.receive_message()
            connection.send_message(replace(offer, **change).encode())

        slots = r"of step \d+ in round \d+ of rank [78] \(slots of [0-9,]+ bytes, plan [0-9a-f]{16}\)"
        refusal = rf"offers snapshot \d+ {slots}, but snapshot \d+ {slots} was requested$"
        with serving(offer_another) as address, pytest.raises(CheckpointError, match=refusal):
            fetch(address, SnapshotRequest(hosts.planned, SNAPSHOT), slot)
    assert slot.read_bytes() == before


def test_partly_fetched_snapshot_is_not_sealed(
    hosts: PeerHosts, slot: Path, address: PeerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SlotReader.read_contents_into

    def read_half(reader: SlotReader, offset: int, buffer: bytearray | memoryview) -> None:
        if offset >= 500:
            raise CheckpointError("the slot was truncated while open")
        read(reader, offset, buffer)

    monkeypatch.setattr(SlotReader, "read_contents_into", read_half)
    with pytest.raises(CommunicationError, match="the peer closed the connection"):
        fetch(address, SnapshotRequest(hosts.planned, SNAPSHOT), slot)
    with SlotReader(slot) as found:
        assert found.words().state == SlotState.WRITING


def fetch_alone(arena: Arena, hosts: PeerHosts, missing: list[int]) -> str | None:
    """Fetch as the only rank of a job, whose own host has its snapshot under the name of a copy."""
    planned = replace(hosts.planned, owner=0)
    plan = FetchPlan(MemoryPoint(SNAPSHOT, (0,)), missing, ["here"], [planned])
    return fetch_missing(
        plan, arena, arena.slot(0, 0), 0, single_rank_groups(), network_interface="", store_address="", limits=LIMITS
    )


def test_all_agree_on_whether_every_host_has_its_own(hosts: PeerHosts, tmp_path: Path) -> None:
    arena = create_arena(tmp_path / "third")
    assert fetch_alone(arena, hosts, []) is None
    header = SlotHeader(0, 0, 2, hosts.planned.contents_bytes, bytes.fromhex(hosts.planned.plan_digest))
    make_slot(arena.slot(0, 0), header)
    problem = fetch_alone(arena, hosts, [0])
    assert problem is not None
    assert problem.startswith("rank 0: 127.0.0.1:")


def test_a_rank_that_cannot_meet_the_others_is_a_problem_of_all(hosts: PeerHosts, tmp_path: Path) -> None:
    plan = FetchPlan(MemoryPoint(SNAPSHOT, (0,)), [0], ["here"], [hosts.planned])
    problem = fetch_missing(
        plan, hosts.own, tmp_path, 0, single_rank_groups(), network_interface="nope0", store_address="", limits=LIMITS
    )
    assert problem is not None
    assert "nope0" in problem


def test_own_slots_and_copies_become_ones_of_the_new_round(hosts: PeerHosts) -> None:
    own = [hosts.own.slot(OWNER, slot) for slot in (0, 1)]
    copy = hosts.own.copy(3, 0)
    hosts.put(step=5, snapshot=1)
    copy.write_bytes(own[0].read_bytes())
    after = SealedSnapshot(10, 3, 4)
    adopt(SNAPSHOT, after, own, [copy, hosts.own.copy(3, 1)], Persist.PENDING)
    found = []
    for path in (*own, copy):
        with SlotReader(path) as slot:
            words = slot.words()
        found.append((words.step, words.round, words.snapshot, words.persist))
    assert found == [(10, 3, 4, Persist.PENDING), (5, 2, 1, Persist.PENDING), (10, 3, 4, Persist.NONE)]


def test_a_new_number_keeps_the_slot() -> None:
    for before, least, num_slots, expected in [(4, 5, 2, 6), (5, 5, 2, 5), (4, 6, 2, 6), (3, 4, 1, 4), (0, 1, 2, 2)]:
        number = number_in_same_slot(before, least, num_slots)
        assert number == expected
        assert number % num_slots == before % num_slots


def test_start_without_storage_keeps_snapshots_in_memory() -> None:
    candidate = StorageCandidate("main", 5, "place", is_own=True)
    start = StartingPoint(
        branch="main",
        branch_created_unix_s=0.0,
        candidates=(candidate,),
        last_round=0,
        warnings=("a warning",),
        notes=(),
    )
    assert fallback_start(start, 10, "away").warnings == (
        "a warning",
        "WARNING: step 10 is in memory, but a peer's copy of it did not arrive: away",
    )
    with pytest.raises(CheckpointError, match=r"storage has no checkpoint: away; start again, or remove the arenas"):
        fallback_start(replace(start, candidates=()), 10, "away")


def hosts_of_peers(layout: Layout, ranks_per_host: int) -> list[str]:
    return [f"host-{rank // ranks_per_host}" for rank in range(layout.world_size)]


def groups_of(layout: Layout, rank: int) -> list[tuple[int, ...]]:
    return [layout.ranks_along(rank, "tp"), layout.ranks_along(rank, "pp"), layout.ranks_along(rank, "dp")]


@pytest.mark.slow
@given(st.sampled_from([1, 2, 4, 8]), st.integers(2, 5), st.integers(2, 9), st.sampled_from([1, 2, 4, 8]))
def test_losing_the_hosts_of_any_one_group_loses_nothing(
    tp_size: int, pp_size: int, dp_size: int, ranks_per_host: int
) -> None:
    layout = Layout(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
    host_of = hosts_of_peers(layout, ranks_per_host)
    try:
        keepers = choose_keepers(layout, host_of)
    except TopologyError:
        # The message must be true: some rank has no host outside of its groups, or no shift suits all ranks.
        assume(ranks_per_host > tp_size)
        return
    assert sorted(keepers) == list(range(layout.world_size))
    for rank in range(layout.world_size):
        for group in groups_of(layout, rank):
            lost = {host_of[member] for member in group}
            for owner in range(layout.world_size):
                survivors = {host_of[owner], host_of[keepers[owner]]} - lost
                assert survivors or owner not in group, (rank, owner)


def test_pp2_dp2_with_a_rank_per_host_has_keepers() -> None:
    layout = Layout(tp_size=1, pp_size=2, dp_size=2)
    assert choose_keepers(layout, hosts_of_peers(layout, 1)) == (3, 2, 1, 0)


def test_layout_without_a_host_outside_the_own_groups_is_refused() -> None:
    for (tp_size, pp_size, dp_size), ranks_per_host in [
        ((2, 1, 4), 2), ((2, 4, 1), 2), ((1, 2, 2), 4), ((1, 2, 4), 4),
    ]:  # fmt: skip
        layout = Layout(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size)
        with pytest.raises(TopologyError, match=r"checkpoint\.has_peer_copies=true: .* leaves no host outside"):
            raise AssertionError(f"{layout}: {choose_keepers(layout, hosts_of_peers(layout, ranks_per_host))}")


def at(*steps: int) -> list[SealedSnapshot]:
    return [SealedSnapshot(step, 0, step // 10) for step in steps]


# test_attach_decisions.py tests which snapshot is the newest in the reports of all ranks.


def test_snapshots_of_another_round_do_not_mix() -> None:
    mixed = {0: at(50), 1: [SealedSnapshot(50, 1, 5)]}
    assert newest_in_memory([mixed, mixed], ["a", "a"]) is None


def test_own_memory_is_preferred_to_a_copy_elsewhere() -> None:
    host_of = ["a", "a", "b", "b"]
    here, own = {rank: at(50) for rank in (0, 1, 2, 3, 7)}, {2: at(50), 3: at(50)}
    assert newest_in_memory([here, here, own, own], host_of) == MemoryPoint(at(50)[0], (0, 1, 2, 3))


def test_the_ranks_of_a_host_share_the_sending() -> None:
    host_of = ["a", "a", "b", "b"]
    assert [serving_rank(0, owner, host_of) for owner in (2, 3)] == [0, 1]
    assert [serving_rank(3, owner, host_of) for owner in (0, 1)] == [2, 3]
