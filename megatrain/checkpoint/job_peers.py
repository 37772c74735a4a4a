"""A job's copies at peers, in the order in which a start comes to them: keepers, room, fetching, then sending.

Where checkpoint.has_peer_copies is false there are none, and all that is left to do is to ask for less room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatrain.checkpoint.agreement import raised_by_all
from megatrain.checkpoint.arena_room import RoomNeeded, check_room
from megatrain.checkpoint.attach import Attachment
from megatrain.checkpoint.copy_slots import NUM_COPY_SLOTS, copies_without_use, missing_copy_bytes, remove_copies
from megatrain.checkpoint.peer_copies import PeerCopies, start_copies
from megatrain.checkpoint.peer_fetch import FetchPlan, adopt, fetch_missing, number_in_same_slot
from megatrain.checkpoint.peers import choose_keepers
from megatrain.checkpoint.snapshot_offer import PlannedSlot
from megatrain.checkpoint.start import StartingPoint
from megatrain.comm import Mesh
from megatrain.comm.peer_link import PeerLimits
from megatrain.config.config import Config
from megatrain.contracts.arena import SealedSnapshot
from megatrain.contracts.arena_layout import Persist
from megatrain.contracts.errors import CheckpointError

_CALL_S = 30.0
_PROOF_S = 10.0


class JobPeers:
    """What this rank has to do with the snapshots of others. All ranks call every method together, but `news`."""

    def __init__(self, config: Config, mesh: Mesh, local_rank: int, master: str) -> None:
        """master: host and port where the ranks of the job meet, "" when all of them are on this machine."""
        self._config = config
        self._mesh = mesh
        self._local_rank = local_rank
        self._master = master
        self._keepers: tuple[int, ...] = ()
        self._copies: PeerCopies | None = None

    @property
    def are_wanted(self) -> bool:
        """Whether snapshots are copied to peers at all."""
        return self._config.checkpoint.has_peer_copies

    def choose(self, hosts: Sequence[str]) -> None:
        """Choose which host keeps whose copies. Raises: TopologyError, the same on every rank, when there is no
        placement."""
        if self.are_wanted:
            self._keepers = choose_keepers(self._mesh.layout, hosts)

    def make_room(self, attachment: Attachment, own_bytes: int) -> None:
        """Remove copies that are no longer needed, and refuse to start where the snapshots of a host would not fit.

        own_bytes: what this rank's own slots take beyond what is there.
        Communication: two agreements, a gather and a broadcast.
        Raises: ConfigError with the arithmetic, CheckpointError, the same on every rank.
        """
        arena, rank = attachment.arena, self._mesh.rank
        leaving_bytes, copy_bytes = 0, 0
        with raised_by_all(self._mesh.host, rank):
            if self._local_rank == 0:
                leaving_bytes = self._remove_copies(attachment, needed=attachment.missing)
            if self.are_wanted:
                copy_bytes = missing_copy_bytes(arena, self._kept(attachment))
        check_room(
            arena,
            attachment.hosts,
            RoomNeeded(own_bytes, copy_bytes),
            self._config.checkpoint.slots,
            rank,
            self._mesh.host,
            leaving_bytes=leaving_bytes,
        )

    def fetch(self, attachment: Attachment, slots: Sequence[Path]) -> str | None:
        """Have every rank's snapshot in its own slots; return why that failed, the same on every rank, or None.

        Communication: none where every rank has it, else as `fetch_missing`.
        """
        memory = attachment.memory
        if memory is None or not attachment.missing:
            return None
        return fetch_missing(
            FetchPlan(memory, attachment.missing, attachment.hosts, attachment.plans),
            attachment.arena,
            slots[memory.snapshot.snapshot % len(slots)],
            self._mesh.rank,
            self._mesh.host,
            network_interface=self._config.runtime.network_interface,
            master=self._master,
            # all wait for the slowest in an agreement, which has the whole of that time
            limits=self._limits(self._config.runtime.checkpoint_timeout_s / 2),
        )

    def adopt(self, attachment: Attachment, slots: Sequence[Path], round_number: int, *, is_wanted: bool) -> int:
        """Have the snapshot that was fetched count as one of this round; return its number.

        is_wanted: whether storage does not have it.
        Communication: one agreement.
        Raises: CheckpointError, the same on every rank.
        """
        assert attachment.memory is not None
        before = attachment.memory.snapshot
        number = number_in_same_slot(before.snapshot, attachment.next_snapshot, len(slots))
        after = SealedSnapshot(before.step, round_number, number)
        owner = self._kept(attachment).owner
        copies = [attachment.arena.copy(owner, slot) for slot in range(NUM_COPY_SLOTS)]
        with raised_by_all(self._mesh.host, self._mesh.rank):
            adopt(before, after, slots, copies, Persist.WANTED if is_wanted else Persist.DONE)
        return number

    def start(self, attachment: Attachment, *, has_old: bool) -> None:
        """Begin to send and to keep copies. Whoever had to be fetched from here has been.

        has_old: whether copies that are there already are of states from which this job goes on.
        Communication: as `start_copies`.
        Raises: CheckpointError, CommunicationError, the same on every rank.
        """
        if self._local_rank == 0:
            self._remove_copies(attachment, needed=())
        if self.are_wanted:
            self._copies = start_copies(
                attachment.arena,
                self._keepers,
                attachment.plans,
                self._mesh.rank,
                self._mesh.host,
                network_interface=self._config.runtime.network_interface,
                master=self._master,
                limits=self._limits(self._config.runtime.checkpoint_timeout_s),
                has_old=has_old,
            )

    def offer(self, slot: Path | None) -> None:
        """Have the snapshot in this slot copied. Returns at once."""
        if self._copies is not None and slot is not None:
            self._copies.offer(slot)

    def report(self) -> int:
        """Return this rank's number for its copies at the next agreement, which takes the smallest of all ranks."""
        return self._copies.report() if self._copies is not None else 0

    def hear(self, smallest: int) -> None:
        """Take note of the smallest of all ranks' reports."""
        if self._copies is not None:
            self._copies.hear(smallest)

    def news(self) -> list[str]:
        """Return what has changed with the copies of all ranks since the last call, in words."""
        return self._copies.news() if self._copies is not None else []

    def close(self) -> None:
        """Send and keep no more."""
        if self._copies is not None:
            self._copies.close()

    def _kept(self, attachment: Attachment) -> PlannedSlot:
        return attachment.plans[self._keepers.index(self._mesh.rank)]

    def _remove_copies(self, attachment: Attachment, needed: Sequence[int]) -> int:
        """Remove this host's copies for owners that are neither kept nor needed; return the bytes of those needed."""
        ranks = attachment.ranks_of_host(self._mesh.rank)
        kept = {self._keepers.index(rank) for rank in ranks} if self.are_wanted else set()
        now, later = copies_without_use(attachment.arena.slots(), kept, needed)
        remove_copies(now)
        return sum(file.path.stat().st_size for file in later)

    def _limits(self, total_s: float) -> PeerLimits:
        return PeerLimits(min(_PROOF_S, total_s), min(_CALL_S, total_s), total_s)


def storage_instead(start: StartingPoint, step: int, problem: str) -> StartingPoint:
    """Return from what to go on when the snapshots of `step` in memory did not come together.

    Raises: CheckpointError when storage has nothing: beginning anew would throw away what is still in memory.
    """
    if not start.candidates:
        raise CheckpointError(
            f"step {step} is in the memory of hosts, but a peer's copy of it did not come, and storage has no "
            f"checkpoint: {problem}; start again, or remove the arenas (megatrain-arena1.*) to start without them"
        )
    warning = f"WARNING: step {step} is in memory, but a peer's copy of it did not come: {problem}"
    return replace(start, warnings=(*start.warnings, warning))
