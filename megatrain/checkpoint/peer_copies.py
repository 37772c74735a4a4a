"""Copies of snapshots in a peer's memory: a rank sends its newest snapshot to its keeper, and keeps those of one rank.

The copies run in threads of the lowest priority; a step only notifies one of them. A copy that fails (the peer cannot
be reached, or the slot is needed again) is abandoned, and the next snapshot is the next attempt. peers.py chooses the
keepers. Source: ByteRobust (SOSP'25, arXiv:2509.16293).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatrain.arena.directory import Arena
from megatrain.arena.slot_file import SlotReader
from megatrain.checkpoint.agreement import raised_by_all
from megatrain.checkpoint.copy_slots import SlotFiller, open_copy_slots, slot_to_overwrite
from megatrain.checkpoint.snapshot_offer import (
    PlannedSlot,
    SlotReusedError,
    SnapshotOffer,
    receive_contents,
    send_contents,
)
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.comm.peer_rendezvous import PeerRendezvous, open_peer_rendezvous
from megatrain.contracts.errors import CheckpointError, CommunicationError
from megatrain.peers.link import PeerAddress, PeerConnection, PeerLimits, connect_peer
from megatrain.peers.server import PeerServer
from megatrain.programs.background import lower_thread_priority
from megatrain.programs.own_output import log_line

_SEND = b"send"
_HAS_IT = b"has it"
_SEALED = b"sealed"
_CLOSE_S = 2.0
_BUSY_S = 5.0
"""How long an offer waits for the previous copy, which the owner may have abandoned just before this offer."""
_log = partial(log_line, "megatrain")


class CopySender:
    """Sends this rank's sealed snapshots to its keeper. `name` names their owner in messages."""

    def __init__(self, keeper: PeerAddress, secret: bytes, limits: PeerLimits, name: str) -> None:
        self._keeper = keeper
        self._secret = secret
        self._limits = limits
        self._name = name
        self._changed = threading.Condition()
        self._offered: Path | None = None
        self._connection: PeerConnection | None = None
        self._is_closing = False
        self.problem = ""
        """Why the last attempt failed, "" when it succeeded."""
        self._thread = threading.Thread(target=self._run, name="copy-sender", daemon=True)
        self._thread.start()

    def offer(self, path: Path) -> None:
        """Queue the snapshot in this slot, in place of one that is queued already. Returns at once."""
        with self._changed:
            self._offered = path
            self._changed.notify()

    def close(self) -> None:
        """Stop sending. A copy that is being sent is aborted; the keeper still has the previous one."""
        with self._changed:
            self._is_closing = True
            if self._connection is not None:
                self._connection.cut()
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        lower_thread_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offered is not None or self._is_closing)
                path, self._offered = self._offered, None
                if path is None or self._is_closing:
                    return
            try:
                problem = self._send(path)
            except SlotReusedError as error:
                problem = f"{error}: copies take longer than the time between snapshots"
            except (CheckpointError, CommunicationError) as error:
                problem = str(error)
            if not self._is_closing:
                self._report_problem(problem)

    def _report_problem(self, problem: str) -> None:
        """Report once when copies begin to fail, and once when they succeed again."""
        if problem and not self.problem:
            _log(f"the copy of {self._name}'s snapshot failed; the next snapshot will be tried: {problem}")
        elif self.problem and not problem:
            _log(f"copies of {self._name}'s snapshots succeed again")
        self.problem = problem

    def _send(self, path: Path) -> str:
        """Send a slot's snapshot and return "". If there is nothing to send, return the earlier problem."""
        with SlotReader(path) as slot:
            offer = SnapshotOffer.of_slot(slot)
            if offer is None:
                return self.problem
            with connect_peer(self._keeper, self._secret, self._limits) as connection:
                with self._changed:
                    self._connection = connection
                    if self._is_closing:
                        return self.problem
                try:
                    self._copy(connection, slot, offer)
                finally:
                    with self._changed:
                        self._connection = None
        return ""

    def _copy(self, connection: PeerConnection, slot: SlotReader, offer: SnapshotOffer) -> None:
        connection.send_message(offer.encode())
        answer = connection.receive_message()
        if answer == _SEND:
            send_contents(connection, slot, offer.sealed)
            answer = connection.receive_message()
        if answer not in (_HAS_IT, _SEALED):
            reason = answer.decode(errors="replace")
            raise CommunicationError(f"{connection.location}: the keeper refused the copy: {reason}")


class CopyKeeper:
    """Keeps the copies of one other rank. The threads of a server call `serve`."""

    def __init__(self, kept: PlannedSlot, slots: Sequence[SlotFiller]) -> None:
        self._kept = kept
        self._slots = tuple(slots)
        self._lock = threading.Lock()
        self.problem = ""
        """Why the last copy was not completed."""

    def serve(self, connection: PeerConnection) -> None:
        """Receive one copy. After a failure, the last complete copy is still there, and the owner offers another."""
        try:
            offer = SnapshotOffer.decode(connection.receive_message(), connection.location)
            if offer.planned != self._kept:
                connection.send_message(f"this rank keeps copies of {self._kept}, not of {offer.planned}".encode())
            elif not self._lock.acquire(timeout=_BUSY_S):
                connection.send_message(b"another copy of that rank is being received")
            else:
                try:
                    answer = self._keep(connection, offer)
                finally:
                    self._lock.release()
                # only after the lock is released: the owner may offer the next one as soon as it has this answer
                connection.send_message(answer)
        except (CheckpointError, CommunicationError) as error:
            self.problem = str(error)

    def _keep(self, connection: PeerConnection, offer: SnapshotOffer) -> bytes:
        """Receive the offered copy unless it is here already, and return the answer for the owner."""
        words = [slot.words() for slot in self._slots]
        if any(found.sealed == offer.sealed for found in words):
            return _HAS_IT
        slot = self._slots[slot_to_overwrite(words)]
        slot.begin(offer)
        connection.send_message(_SEND)
        receive_contents(connection, offer.contents_bytes, slot.write)
        slot.seal()
        self.problem = ""
        return _SEALED


class PeerCopies:
    """This rank's part in the copies, and rank 0's messages about the copies of all ranks.

    keepers: the rank that keeps each rank's copies, by rank.
    """

    def __init__(
        self, rank: int, keepers: Sequence[int], rendezvous: PeerRendezvous, keeper: CopyKeeper, limits: PeerLimits
    ) -> None:
        self._rank = rank
        self._keepers = tuple(keepers)
        self._server = PeerServer(rendezvous.listener, rendezvous.secret, keeper.serve, limits)
        self._sender = CopySender(rendezvous.addresses[keepers[rank]], rendezvous.secret, limits, f"rank {rank}")
        self._failing: int | None = None
        self._reported: int | None = None

    def offer(self, path: Path) -> None:
        """Copy the snapshot in this slot to the keeper in the background. Returns at once."""
        self._sender.offer(path)

    def failure_number(self) -> int:
        """Return this rank's number if the last copy of its snapshot failed, else a number above those of all ranks.

        So the minimum over all ranks is the lowest rank whose copy failed.
        """
        return self._rank if self._sender.problem else self._rank + len(self._keepers)

    def set_smallest_failure_number(self, smallest: int) -> None:
        """Record the smallest of all ranks' failure numbers."""
        self._failing = smallest if smallest < len(self._keepers) else None

    def new_messages(self) -> list[str]:
        """Return messages about what has changed since the last call."""
        if self._failing == self._reported:
            return []
        self._reported = self._failing
        if self._failing is None:
            return ["copies of all ranks' snapshots reach their peers again"]
        rank, keeper = self._failing, self._keepers[self._failing]
        return [
            (
                f"WARNING: the copy of rank {rank}'s snapshot did not reach rank {keeper}; each later snapshot will "
                f"be tried, and the output of rank {rank} has the reason"
            )
        ]

    def close(self) -> None:
        """Stop sending and keeping copies. The arena keeps its content."""
        self._sender.close()
        self._server.close()


def start_copies(
    arena: Arena,
    keepers: Sequence[int],
    plans: Sequence[PlannedSlot],
    rank: int,
    cpu_groups: CpuGroups,
    *,
    network_interface: str,
    store_address: str,
    limits: PeerLimits,
    has_old: bool,
) -> PeerCopies:
    """Reserve memory for the copies that this rank keeps, and begin to send and to keep copies.

    has_old: whether existing copies belong to the state from which this job resumed.
    Communication: as `open_peer_rendezvous`, and one agreement.
    Raises: CheckpointError, CommunicationError, the same on every rank.
    """
    kept = plans[keepers.index(rank)]
    with raised_by_all(cpu_groups, rank):
        slots = open_copy_slots(arena, kept)
        for slot in slots if not has_old else ():
            slot.clear()
    rendezvous = open_peer_rendezvous(cpu_groups, rank, network_interface, store_address)
    return PeerCopies(rank, keepers, rendezvous, CopyKeeper(kept, slots), limits)
