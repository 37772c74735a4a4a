"""A restart after hosts were lost: their ranks fetch their snapshots from the hosts that have copies.

Every rank serves its host's arena for as long as any rank fetches, and all agree at the end: either everybody's
snapshot is in its own slot, or no rank resumes from it. Fetched snapshots then become ones of the new round, because
whoever was to bring them to storage in the old one is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain.checkpoint.copy_slots import SlotFiller
from megatrain.checkpoint.peers import MemoryPoint, serving_rank
from megatrain.checkpoint.snapshot_offer import (
    PlannedSlot,
    SnapshotOffer,
    SnapshotRequest,
    receive_image,
    send_image,
)
from megatrain.comm.host_groups import HostGroups
from megatrain.comm.peer_link import PeerConnection, PeerLimits, PeerServer, connect_peer
from megatrain.comm.peer_meeting import Meeting, meet_peers
from megatrain.contracts.arena import Arena, SealedSnapshot
from megatrain.contracts.arena_layout import Persist
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.errors import CheckpointError, CommunicationError


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Who has what, as all ranks know it. `missing` are the ranks that lack it; hosts and plans are by rank."""

    memory: MemoryPoint
    missing: Sequence[int]
    hosts: Sequence[str]
    plans: Sequence[PlannedSlot]


def fetch_missing(
    plan: FetchPlan,
    arena: Arena,
    slot: Path,
    rank: int,
    host: HostGroups,
    *,
    network_interface: str,
    master: str,
    limits: PeerLimits,
) -> str | None:
    """Have every rank's snapshot in a slot of its own; return why that failed, the same on every rank, or None.

    slot: where this rank's comes to, if it is not there.
    Communication: as `meet_peers`, one agreement, and the snapshots of the ranks that lack them.
    """
    try:
        meeting = meet_peers(host, rank, network_interface, master)
    except CommunicationError as error:
        return str(error)
    problem = None
    with PeerServer(meeting.listener, meeting.secret, partial(serve_arena, arena), limits):
        if rank in plan.missing:
            try:
                _fetch(plan, meeting, slot, rank, limits)
            except (CheckpointError, CommunicationError) as error:
                problem = f"rank {rank}: {error}"
        # no rank closes before all ranks have fetched what they need
        return host.agree(rank, problem)


def _fetch(plan: FetchPlan, meeting: Meeting, slot: Path, rank: int, limits: PeerLimits) -> None:
    server = serving_rank(plan.memory.holder_of[rank], rank, plan.hosts)
    with connect_peer(meeting.addresses[server], meeting.secret, limits) as connection:
        fetch_snapshot(connection, SnapshotRequest(plan.plans[rank], plan.memory.snapshot), slot)


def fetch_snapshot(connection: PeerConnection, wanted: SnapshotRequest, slot: Path) -> None:
    """Fill a slot with the snapshot that the other side of a connection has, and seal it.

    Raises: CommunicationError, CheckpointError; the slot holds nothing whole then.
    """
    connection.send_message(wanted.encode())
    offer = SnapshotOffer.decode(connection.receive_message(), connection.place)
    if (offer.planned, offer.sealed) != (wanted.planned, wanted.sealed):
        raise CheckpointError(f"{connection.place}: offers {offer.planned} {offer.sealed}, not what was asked for")
    filler = SlotFiller(slot)
    try:
        filler.begin(offer)
        receive_image(connection, offer.image_bytes, filler.write)
        filler.seal()
    finally:
        filler.close()


def serve_arena(arena: Arena, connection: PeerConnection) -> None:
    """Send the snapshot that is asked for, if this host has it; else only close the connection."""
    try:
        request = SnapshotRequest.decode(connection.receive_message(), connection.place)
        for file in arena.slots():
            if file.rank == request.planned.owner and _serve_slot(file.path, request, connection):
                return
    except (CheckpointError, CommunicationError):
        # whoever asked sees its connection end, says so, and all ranks take another way
        return


def _serve_slot(path: Path, request: SnapshotRequest, connection: PeerConnection) -> bool:
    """Send what a slot holds if that is what is asked for, and say whether it was."""
    try:
        slot = SlotReader(path)
    except CheckpointError:
        return False  # a damaged slot; another one may have it
    with slot:
        offer = SnapshotOffer.of_slot(slot)
        if offer is None or (offer.planned, offer.sealed) != (request.planned, request.sealed):
            return False
        connection.send_message(offer.encode())
        send_image(connection, slot, request.sealed)
    return True


def adopt(
    before: SealedSnapshot, after: SealedSnapshot, own: Sequence[Path], copies: Sequence[Path], persist: Persist
) -> None:
    """Have a snapshot count as one of this round, in this rank's slots and in the copies that it keeps.

    persist: what becomes of it in storage.
    Raises: CheckpointError naming the file.
    """
    for paths, wanted in ((own, persist), (copies, Persist.NONE)):
        for path in paths:
            if path.exists():
                filler = SlotFiller(path)
                try:
                    filler.rename(before, after, wanted)
                finally:
                    filler.close()


def number_in_same_slot(before: int, least: int, num_slots: int) -> int:
    """Return the first number from `least` on whose snapshot lies in the slot of number `before`."""
    return least + (before - least) % num_slots
