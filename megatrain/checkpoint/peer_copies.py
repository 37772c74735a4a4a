"""Copies of snapshots in a peer's memory: a rank sends its newest to its keeper, and keeps those of one other rank.

All of it runs in threads at the lowest priority: a step pays for a word to one of them. A copy that does not get
through (the peer is away, the slot is needed again) is given up, and the next snapshot is the next attempt. Who keeps
whose is decided in peers.py. Source: ByteRobust (SOSP'25, arXiv:2509.16293).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megatrain.checkpoint.agreement import raised_by_all
from megatrain.checkpoint.copy_slots import SlotFiller, open_copy_slots, slot_to_overwrite
from megatrain.checkpoint.snapshot_offer import (
    PlannedSlot,
    SlotReusedError,
    SnapshotOffer,
    holds,
    receive_image,
    send_image,
)
from megatrain.comm.host_groups import HostGroups
from megatrain.comm.peer_link import (
    PeerAddress,
    PeerConnection,
    PeerLimits,
    PeerServer,
    connect_peer,
    lower_thread_priority,
)
from megatrain.comm.peer_meeting import Meeting, meet_peers
from megatrain.contracts.arena import Arena
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.errors import CheckpointError, CommunicationError

_SEND = b"send"
_HAS_IT = b"has it"
_SEALED = b"sealed"
_CLOSE_S = 2.0
_BUSY_S = 5.0
"""How soon a keeper knows that a copy was given up, at most: its owner comes with the next one at once."""


class CopySender:
    """Sends what this rank has sealed to its keeper. `name` is whose snapshots they are, for messages."""

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
        """Why the last attempt failed, "" when it did not."""
        self.bytes_sent = 0
        """Of images that arrived whole."""
        self._thread = threading.Thread(target=self._run, name="copy-sender", daemon=True)
        self._thread.start()

    def offer(self, path: Path) -> None:
        """Have the snapshot in this slot sent, as soon as the one that is on its way is through. Returns at once."""
        with self._changed:
            self._offered = path
            self._changed.notify()

    def close(self) -> None:
        """Send no more. What is on its way is cut; the keeper then has the copy before it."""
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
                self._note(problem)

    def _note(self, problem: str) -> None:
        """Say it once when copies begin to fail, and once when they get through again."""
        if problem and not self.problem:
            _say(f"the copy of {self._name}'s snapshot failed and is tried again at the next one: {problem}")
        elif self.problem and not problem:
            _say(f"copies of {self._name}'s snapshots get through again")
        self.problem = problem

    def _send(self, path: Path) -> str:
        """Send what is in a slot, and return the problem that stays if that is nothing."""
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
        if answer == _HAS_IT:
            return
        if answer == _SEND:
            send_image(connection, slot, offer.sealed)
            answer = connection.receive_message()
            if answer == _SEALED:
                self.bytes_sent += offer.image_bytes
                return
        raise CommunicationError(f"{connection.place}: the keeper refused it: {answer.decode(errors='replace')}")


class CopyKeeper:
    """Keeps the copies of one other rank. `serve` is called by the threads of a server."""

    def __init__(self, kept: PlannedSlot, slots: Sequence[SlotFiller]) -> None:
        self._kept = kept
        self._slots = tuple(slots)
        self._lock = threading.Lock()
        self.problem = ""
        """Why the last copy did not get whole."""

    def serve(self, connection: PeerConnection) -> None:
        """Take one copy. What fails leaves the last whole one as it is; its owner tries again."""
        try:
            offer = SnapshotOffer.decode(connection.receive_message(), connection.place)
            if offer.planned != self._kept:
                connection.send_message(f"{self._kept} is kept here, not {offer.planned}".encode())
            elif not self._lock.acquire(timeout=_BUSY_S):
                connection.send_message(b"another copy of that rank is on its way")
            else:
                try:
                    answer = self._keep(connection, offer)
                finally:
                    self._lock.release()
                # only now: with this answer the owner may offer the next one
                connection.send_message(answer)
        except (CheckpointError, CommunicationError) as error:
            self.problem = str(error)

    def _keep(self, connection: PeerConnection, offer: SnapshotOffer) -> bytes:
        """Take a copy that is not here yet, and return what to answer."""
        words = [slot.words() for slot in self._slots]
        if any(holds(found, offer.sealed) for found in words):
            return _HAS_IT
        slot = self._slots[slot_to_overwrite(words)]
        slot.begin(offer)
        connection.send_message(_SEND)
        receive_image(connection, offer.image_bytes, slot.write)
        slot.seal()
        self.problem = ""
        return _SEALED


class PeerCopies:
    """This rank's part in the copies, and what rank 0 says of everybody's.

    keepers: by rank, who keeps its copies.
    """

    def __init__(
        self, rank: int, keepers: Sequence[int], meeting: Meeting, keeper: CopyKeeper, limits: PeerLimits
    ) -> None:
        self._rank = rank
        self._keepers = tuple(keepers)
        self._server = PeerServer(meeting.listener, meeting.secret, keeper.serve, limits)
        self._sender = CopySender(meeting.addresses[keepers[rank]], meeting.secret, limits, f"rank {rank}")
        self._failing: int | None = None
        self._told: int | None = None

    def offer(self, path: Path) -> None:
        """Have the snapshot in this slot copied. Returns at once."""
        self._sender.offer(path)

    def report(self) -> int:
        """Return this rank's number at the next agreement, where all ranks learn the smallest one."""
        return self._rank if self._sender.problem else self._rank + len(self._keepers)

    def hear(self, smallest: int) -> None:
        """Take note of the smallest of all ranks' reports."""
        self._failing = smallest if smallest < len(self._keepers) else None

    def news(self) -> list[str]:
        """Return what has changed since the last call, in words."""
        if self._failing == self._told:
            return []
        self._told = self._failing
        if self._failing is None:
            return ["copies of all ranks' snapshots get to their peers again"]
        rank, keeper = self._failing, self._keepers[self._failing]
        return [
            (
                f"WARNING: the copy of rank {rank}'s snapshot did not get to rank {keeper}; it is tried again at every "
                f"snapshot, and the output of rank {rank} says why"
            )
        ]

    def close(self) -> None:
        """Send and keep no more. What is in the arena stays there."""
        self._sender.close()
        self._server.close()


def start_copies(
    arena: Arena,
    keepers: Sequence[int],
    plans: Sequence[PlannedSlot],
    rank: int,
    host: HostGroups,
    *,
    network_interface: str,
    master: str,
    limits: PeerLimits,
    has_old: bool,
) -> PeerCopies:
    """Make room for the copies that this rank keeps, and begin to send and to keep.

    has_old: whether copies that are there already are of states from which this job goes on.
    Communication: as `meet_peers`, and one agreement.
    Raises: CheckpointError, CommunicationError, the same on every rank.
    """
    kept = plans[keepers.index(rank)]
    with raised_by_all(host, rank):
        slots = open_copy_slots(arena, kept)
        for slot in slots if not has_old else ():
            slot.clear()
    meeting = meet_peers(host, rank, network_interface, master)
    return PeerCopies(rank, keepers, meeting, CopyKeeper(kept, slots), limits)


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} megatrain: {text}", file=sys.stderr, flush=True)
