"""Two hosts on one machine, the owner of a snapshot and the keeper of its copies, with real sockets between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.arena.directory import Arena, create_arena
from megatrain.arena.slot_file import SlotReader
from megatrain.checkpoint.copy_slots import SlotFiller, open_copy_slots
from megatrain.checkpoint.snapshot_offer import PlannedSlot
from megatrain.peers.link import PeerAddress, PeerConnection, PeerLimits
from megatrain.peers.server import PeerServer, listen
from tests.helpers.arena_snapshots import put_slot, read_contents
from tests.helpers.waiting import DEADLINE_S

SECRET = b"s" * 32
OWNER = 7
LIMITS = PeerLimits(authentication_s=DEADLINE_S, call_s=DEADLINE_S, total_s=2 * DEADLINE_S)


class PeerHosts:
    """The arenas of both hosts. Tests write the owner's snapshots, as a worker leaves them."""

    def __init__(self, directory: Path) -> None:
        self.own = create_arena(directory / "own")
        self.peer = create_arena(directory / "peer")
        self.put(step=10, snapshot=0)
        with SlotReader(self.own.slot(OWNER, 0)) as slot:
            self.planned = PlannedSlot(OWNER, slot.header.contents_bytes, slot.header.plan_digest.hex())

    def put(self, *, step: int, snapshot: int) -> Path:
        return put_slot(self.own, OWNER, step=step, snapshot=snapshot)

    def open_copies(self) -> list[SlotFiller]:
        return open_copy_slots(self.peer, self.planned)


def whole_contents(path: Path) -> bytes:
    with SlotReader(path) as slot:
        return read_contents(slot, 0, slot.header.contents_bytes)


@contextmanager
def serving(serve: Callable[[PeerConnection], None], limits: PeerLimits = LIMITS) -> Iterator[PeerAddress]:
    """Serve at an address of this machine."""
    listener = listen("127.0.0.1")
    address = PeerAddress(*listener.getsockname())
    with PeerServer(listener, SECRET, serve, limits):
        yield address


def copies(arena: Arena) -> list[Path]:
    return [file.path for file in arena.slots() if file.is_copy]
