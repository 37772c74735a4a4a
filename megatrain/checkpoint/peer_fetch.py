"""Restart after hosts were lost: their ranks fetch their snapshots from the hosts that have copies.

Every rank serves its host's arena as long as any rank fetches. At the end all ranks agree: either every rank's snapshot
is in its own slot, or no rank resumes from it. Fetched snapshots then become snapshots of the new round, because the
writer that would have stored one in the old round is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain.arena.directory import Arena
from megatrain.arena.slot_file import SlotReader
from megatrain.arena.slot_layout import Persist, SealedSnapshot
from megatrain.checkpoint.copy_slots import SlotFiller
from megatrain.checkpoint.peers import MemoryPoint, serving_rank
from megatrain.checkpoint.snapshot_offer import (
    PlannedSlot,
    SnapshotOffer,
    SnapshotRequest,
    receive_contents,
    send_contents,
)
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.comm.peer_rendezvous import PeerRendezvous, open_peer_rendezvous
from megatrain.contracts.errors import CheckpointError, CommunicationError
from megatrain.peers.link import PeerConnection, PeerLimits, connect_peer
from megatrain.peers.server import PeerServer


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The holders of a snapshot, the same on all ranks. `missing`: ranks that lack it. `hosts` and `plans`: by rank."""

    memory: MemoryPoint
    missing: Sequence[int]
    hosts: Sequence[str]
    plans: Sequence[PlannedSlot]


def fetch_missing(
    plan: FetchPlan,
    arena: Arena,
    slot: Path,
    rank: int,
    cpu_groups: CpuGroups,
    *,
    network_interface: str,
    store_address: str,
    limits: PeerLimits,
) -> str | None:
    """Fetch missing snapshots into their ranks' own slots. Return the first error, the same on every rank, or None.

    slot: the target for this rank's snapshot, if this rank lacks it.
    Communication: as `open_peer_rendezvous`, one agreement, and the snapshots of the ranks that lack them.
    """
    try:
        rendezvous = open_peer_rendezvous(cpu_groups, rank, network_interface, store_address)
    except CommunicationError as error:
        return str(error)
    problem = None
    with PeerServer(rendezvous.listener, rendezvous.secret, partial(serve_arena, arena), limits):
        if rank in plan.missing:
            try:
                _fetch(plan, rendezvous, slot, rank, limits)
            except (CheckpointError, CommunicationError) as error:
                problem = f"rank {rank}: {error}"
        # no rank closes before all ranks have fetched what they need
        return cpu_groups.agree(rank, problem)


def _fetch(plan: FetchPlan, rendezvous: PeerRendezvous, slot: Path, rank: int, limits: PeerLimits) -> None:
    server = serving_rank(plan.memory.holder_of[rank], rank, plan.hosts)
    with connect_peer(rendezvous.addresses[server], rendezvous.secret, limits) as connection:
        fetch_snapshot(connection, SnapshotRequest(plan.plans[rank], plan.memory.snapshot), slot)


def _snapshot_text(planned: PlannedSlot, sealed: SealedSnapshot) -> str:
    return f"snapshot {sealed.snapshot} of step {sealed.step} in round {sealed.round} of {planned}"


def fetch_snapshot(connection: PeerConnection, wanted: SnapshotRequest, slot: Path) -> None:
    """Fill a slot with the peer's snapshot, and seal it.

    Raises: CommunicationError, CheckpointError; the slot then holds no complete snapshot.
    """
    connection.send_message(wanted.encode())
    offer = SnapshotOffer.decode(connection.receive_message(), connection.location)
    if (offer.planned, offer.sealed) != (wanted.planned, wanted.sealed):
        raise CheckpointError(
            f"{connection.location}: offers {_snapshot_text(offer.planned, offer.sealed)}, but "
            f"{_snapshot_text(wanted.planned, wanted.sealed)} was requested"
        )
    filler = SlotFiller(slot)
    try:
        filler.begin(offer)
        receive_contents(connection, offer.contents_bytes, filler.write)
        filler.seal()
    finally:
        filler.close()


def serve_arena(arena: Arena, connection: PeerConnection) -> None:
    """Send the requested snapshot, if this host has it; otherwise only close the connection."""
    try:
        request = SnapshotRequest.decode(connection.receive_message(), connection.location)
        for file in arena.slots():
            if file.rank == request.planned.owner and _serve_slot(file.path, request, connection):
                return
    except (CheckpointError, CommunicationError):
        # the requesting rank reports that its connection ended; all ranks then resume from storage
        return


def _serve_slot(path: Path, request: SnapshotRequest, connection: PeerConnection) -> bool:
    """Send the slot's snapshot if it is the requested one. Returns whether it was."""
    try:
        slot = SlotReader(path)
    except CheckpointError:
        return False  # a damaged slot; another slot may have the snapshot
    with slot:
        offer = SnapshotOffer.of_slot(slot)
        if offer is None or (offer.planned, offer.sealed) != (request.planned, request.sealed):
            return False
        connection.send_message(offer.encode())
        send_contents(connection, slot, request.sealed)
    return True


def adopt(
    before: SealedSnapshot, after: SealedSnapshot, own: Sequence[Path], copies: Sequence[Path], persist: Persist
) -> None:
    """Relabel a snapshot as one of this round, in this rank's slots and in the copies that it keeps.

    persist: the new storage state of this rank's slot. A copy gets NONE, because only its owner's slot is stored.
    Raises: CheckpointError naming the file.
    """
    for paths, state in ((own, persist), (copies, Persist.NONE)):
        for path in paths:
            if path.exists():
                filler = SlotFiller(path)
                try:
                    filler.relabel(before, after, state)
                finally:
                    filler.close()


def number_in_same_slot(before: int, least: int, num_slots: int) -> int:
    """Return the smallest number from `least` on that maps to the same slot as number `before`."""
    return least + (before - least) % num_slots
