"""A snapshot is copied to its keeper whole or not at all; a failure is reported once, and the next snapshot is tried
again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatrain.arena.sealed import sealed_by_rank
from megatrain.arena.slot_file import SlotReader
from megatrain.arena.slot_layout import SealedSnapshot, SlotState, SlotWord
from megatrain.checkpoint import peer_copies, snapshot_offer
from megatrain.checkpoint.copy_slots import SlotFiller
from megatrain.checkpoint.peer_copies import CopyKeeper, CopySender, PeerCopies
from megatrain.checkpoint.snapshot_offer import SnapshotOffer, send_contents
from megatrain.comm.peer_rendezvous import PeerRendezvous
from megatrain.contracts.errors import CommunicationError
from megatrain.peers.link import PeerAddress, PeerConnection, PeerLimits, connect_peer
from megatrain.peers.server import PeerServer, listen
from tests.helpers.peer_arenas import LIMITS, OWNER, SECRET, PeerHosts, serving, whole_contents
from tests.helpers.waiting import DEADLINE_S, wait_until


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerHosts:
    # Small blocks, so that the contents of a slot are many of them.
    monkeypatch.setattr(snapshot_offer, "_BLOCK_BYTES", 100)
    return PeerHosts(tmp_path)


@pytest.fixture
def slots(hosts: PeerHosts) -> Iterator[list[SlotFiller]]:
    found = hosts.open_copies()
    yield found
    for slot in found:
        slot.close()


@contextmanager
def sending(address: PeerAddress, secret: bytes = SECRET) -> Iterator[CopySender]:
    sender = CopySender(address, secret, LIMITS, "rank 7")
    try:
        yield sender
    finally:
        sender.close()


def kept(hosts: PeerHosts) -> list[int]:
    """Return the steps of the copies at the peer."""
    return [one.step for one in sealed_by_rank(hosts.peer, is_copy=True).get(OWNER, [])]


def wait_for_copies(hosts: PeerHosts, *steps: int) -> None:
    wait_until(lambda: kept(hosts) == list(steps), f"copies of steps {steps}")


def wait_for_problem(sender: CopySender, text: str) -> None:
    wait_until(lambda: text in sender.problem, f"the problem {text!r}")


def test_the_newest_two_snapshots_are_kept_byte_for_byte(hosts: PeerHosts, slots: list[SlotFiller]) -> None:
    keeper = CopyKeeper(hosts.planned, slots)
    with serving(keeper.serve) as address, sending(address) as sender:
        sender.offer(hosts.own.slot(OWNER, 0))
        wait_for_copies(hosts, 10)
        sender.offer(hosts.put(step=20, snapshot=1))
        wait_for_copies(hosts, 10, 20)
        sender.offer(hosts.put(step=30, snapshot=2))
        wait_for_copies(hosts, 20, 30)
        for slot in slots:
            with SlotReader(slot.path) as copy, SlotReader(hosts.own.slot(OWNER, copy.words().snapshot % 2)) as own:
                assert SnapshotOffer.of_slot(copy) == SnapshotOffer.of_slot(own)
                assert copy.header.rank == OWNER
            assert whole_contents(copy.path) == whole_contents(own.path)
        assert (sender.problem, keeper.problem) == ("", "")


def test_copy_that_the_keeper_has_is_not_sent_again(hosts: PeerHosts, slots: list[SlotFiller]) -> None:
    path = hosts.own.slot(OWNER, 0)
    with serving(CopyKeeper(hosts.planned, slots).serve) as address:
        with sending(address) as sender:
            sender.offer(path)
            wait_for_copies(hosts, 10)
        # as after a restart of the workers
        with sending(address) as sender, mock.patch.object(peer_copies, "send_contents") as sent:
            sender.problem = "not tried yet"
            sender.offer(path)
            wait_until(lambda: sender.problem == "", "an attempt")
            assert not sent.called
    assert kept(hosts) == [10]


@pytest.mark.parametrize("change", [{"owner": 6}, {"contents_bytes": 64}, {"plan_digest": "00" * 32}])
def test_copy_of_another_size_plan_or_owner_is_refused(
    hosts: PeerHosts, slots: list[SlotFiller], change: dict[str, Any]
) -> None:
    before = [slot.path.read_bytes() for slot in slots]
    with serving(CopyKeeper(replace(hosts.planned, **change), slots).serve) as address, sending(address) as sender:
        sender.offer(hosts.own.slot(OWNER, 0))
        wait_for_problem(sender, "the keeper refused the copy: this rank keeps copies of rank ")
        assert "PlannedSlot" not in sender.problem
    assert [slot.path.read_bytes() for slot in slots] == before


def test_a_rank_of_another_round_gets_nothing_written(hosts: PeerHosts, slots: list[SlotFiller]) -> None:
    before = [slot.path.read_bytes() for slot in slots]
    with (
        serving(CopyKeeper(hosts.planned, slots).serve) as address,
        sending(address, secret=b"o" * 32) as sender,
    ):
        sender.offer(hosts.own.slot(OWNER, 0))
        wait_for_problem(sender, "the peer closed the connection")
    assert [slot.path.read_bytes() for slot in slots] == before


def offer_by_hand(hosts: PeerHosts, address: PeerAddress) -> tuple[PeerConnection, SnapshotOffer]:
    """Begin to send the snapshot in the owner's first slot, up to the request for its bytes."""
    with SlotReader(hosts.own.slot(OWNER, 0)) as slot:
        offer = SnapshotOffer.of_slot(slot)
    assert offer is not None
    connection = connect_peer(address, SECRET, LIMITS)
    connection.send_message(offer.encode())
    assert connection.receive_message() == b"send"
    return connection, offer


def test_interrupted_copy_keeps_the_last_whole_one(hosts: PeerHosts, slots: list[SlotFiller]) -> None:
    keeper = CopyKeeper(hosts.planned, slots)
    with serving(keeper.serve) as address, sending(address) as sender:
        sender.offer(hosts.own.slot(OWNER, 0))
        wait_for_copies(hosts, 10)
        hosts.put(step=30, snapshot=2)
        for _ in range(2):
            connection, _ = offer_by_hand(hosts, address)
            connection.send(bytes(150))
            connection.close()
            wait_until(lambda: "closed the connection" in keeper.problem, "the end of the connection")
            assert kept(hosts) == [10]
            keeper.problem = ""
        sender.offer(hosts.own.slot(OWNER, 0))
        wait_for_copies(hosts, 10, 30)


def test_changed_bytes_are_never_sealed(hosts: PeerHosts, slots: list[SlotFiller]) -> None:
    keeper = CopyKeeper(hosts.planned, slots)
    with serving(keeper.serve) as address:
        connection, offer = offer_by_hand(hosts, address)
        with connection:
            connection.send(bytes(offer.contents_bytes))
            connection._sent.update(b"something else")
            connection.send_tag()
            wait_until(lambda: "bytes were changed" in keeper.problem, "the refusal")
    assert kept(hosts) == []
    assert {slot.words().state for slot in slots} == {SlotState.WRITING, SlotState.EMPTY}


def test_copies_of_a_rank_are_sent_one_by_one(
    hosts: PeerHosts, slots: list[SlotFiller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_copies, "_BUSY_S", 0.01)
    with serving(CopyKeeper(hosts.planned, slots).serve) as address, sending(address) as sender:
        connection, _ = offer_by_hand(hosts, address)
        with connection, SlotReader(hosts.own.slot(OWNER, 0)) as slot:
            sender.offer(slot.path)
            wait_for_problem(sender, "another copy of that rank is being received")
            send_contents(connection, slot, SealedSnapshot(10, 2, 0))
            assert connection.receive_message() == b"sealed"


def test_a_slow_sender_is_given_up_at_the_deadline(hosts: PeerHosts, slots: list[SlotFiller]) -> None:
    keeper = CopyKeeper(hosts.planned, slots)
    with serving(keeper.serve, PeerLimits(authentication_s=600.0, call_s=600.0, total_s=0.2)) as address:
        # On a busy machine the deadline passes during the offer.
        with suppress(CommunicationError), closing(offer_by_hand(hosts, address)[0]):
            wait_until(lambda: keeper.problem != "", "the deadline")
        wait_until(lambda: keeper.problem != "", "the deadline")
        assert "timed out" in keeper.problem or "too slow" in keeper.problem
    assert kept(hosts) == []


def reuse_slot(path: Path) -> None:
    """Do the first action of a worker that takes the next snapshot in a slot."""
    with path.open("r+b") as file:
        file.seek(8 * SlotWord.STATE)
        file.write(SlotState.WRITING.to_bytes(8, "little"))


def during_reads(monkeypatch: pytest.MonkeyPatch, do: Callable[[Path], None]) -> None:
    """Call `do` once, in the middle of the first contents that are read."""
    read, is_done = SlotReader.read_contents_into, threading.Event()

    def read_and_do(slot: SlotReader, offset: int, buffer: bytearray | memoryview) -> None:
        read(slot, offset, buffer)
        if offset > 300 and not is_done.is_set():
            is_done.set()
            do(slot.path)

    monkeypatch.setattr(SlotReader, "read_contents_into", read_and_do)


def test_reused_slot_is_given_up_for_the_newest(
    hosts: PeerHosts, slots: list[SlotFiller], monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = hosts.put(step=20, snapshot=1)
    with serving(CopyKeeper(hosts.planned, slots).serve) as address, sending(address) as sender:

        def reuse(path: Path) -> None:
            reuse_slot(path)
            sender.offer(newer)

        during_reads(monkeypatch, reuse)
        sender.offer(hosts.own.slot(OWNER, 0))
        wait_for_copies(hosts, 20)
        wait_until(lambda: sender.problem == "", "a complete copy")
    assert whole_contents(newer) in [whole_contents(slot.path) for slot in slots]


def test_slot_reused_before_its_copy_ends_is_reported(
    hosts: PeerHosts, slots: list[SlotFiller], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(CopyKeeper(hosts.planned, slots).serve) as address, sending(address) as sender:
        during_reads(monkeypatch, reuse_slot)
        sender.offer(hosts.own.slot(OWNER, 0))
        wait_for_problem(sender, "its next snapshot began before the one of step 10 was sent: copies take longer than")
        # A snapshot that is being written is not sent, and does not clear the problem.
        sender.offer(hosts.own.slot(OWNER, 0))
    assert sender.problem
    assert kept(hosts) == []
    assert capfd.readouterr().err.count("failed; the next snapshot will be tried") == 1


def test_a_keeper_that_is_away_is_reported_once_and_tried_again(
    hosts: PeerHosts, slots: list[SlotFiller], capfd: pytest.CaptureFixture[str]
) -> None:
    listener = listen("127.0.0.1")
    address = PeerAddress(*listener.getsockname())
    limits = PeerLimits(authentication_s=0.1, call_s=5.0, total_s=20.0)
    attempts = []

    class Counted(CopySender):
        def _send(self, path: Path) -> str:
            attempts.append(path)
            return super()._send(path)

    sender = Counted(address, SECRET, limits, "rank 7")
    with closing(sender):
        for number in (1, 2, 3):
            sender.offer(hosts.own.slot(OWNER, 0))
            wait_until(lambda n=number: len(attempts) == n, "an attempt")  # type: ignore[misc]
        wait_for_problem(sender, f"{address}: timed out")
        with PeerServer(listener, SECRET, CopyKeeper(hosts.planned, slots).serve, LIMITS):
            wait_until(lambda: _is_through(sender, hosts), "a complete copy")
            sender.close()
    err = capfd.readouterr().err
    assert err.count("the copy of rank 7's snapshot failed; the next snapshot will be tried: ") == 1
    assert err.count("copies of rank 7's snapshots succeed again") == 1


def _is_through(sender: CopySender, hosts: PeerHosts) -> bool:
    """Take another snapshot: the server first has to finish the ones that were sent."""
    sender.offer(hosts.own.slot(OWNER, 0))
    return sender.problem == "" and kept(hosts) == [10]


def test_close_interrupts_a_transfer(hosts: PeerHosts) -> None:
    is_asked, is_over = threading.Event(), threading.Event()

    def never_answer(connection: PeerConnection) -> None:
        with suppress(Exception):
            connection.receive_message()
        is_asked.set()
        is_over.wait(DEADLINE_S)

    with serving(never_answer) as address:
        sender = CopySender(address, SECRET, LIMITS, "rank 7")
        sender.offer(hosts.own.slot(OWNER, 0))
        assert is_asked.wait(DEADLINE_S)
        sender.close()
        assert not sender._thread.is_alive()
        # The end of a job is not a problem.
        assert sender.problem == ""
        is_over.set()


def test_rank_0_reports_the_first_rank_whose_copy_fails(hosts: PeerHosts, slots: list[SlotFiller]) -> None:
    listener = listen("127.0.0.1")
    rendezvous = PeerRendezvous(listener, (PeerAddress(*listener.getsockname()),) * 4, SECRET)
    copies = PeerCopies(2, (3, 2, 1, 0), rendezvous, CopyKeeper(hosts.planned, slots), LIMITS)
    try:
        assert copies.failure_number() == 6
        copies._sender.problem = "away"
        assert copies.failure_number() == 2
        for smallest, expected in [(4, []), (2, ["rank 2's snapshot did not reach rank 1"]), (2, []), (4, ["again"])]:
            copies.set_smallest_failure_number(smallest)
            news = copies.new_messages()
            assert len(news) == len(expected)
            assert all(part in line for part, line in zip(expected, news, strict=True))
    finally:
        copies.close()
