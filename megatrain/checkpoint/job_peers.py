"""A job's copies at peers. The methods are in the order of a start: choose keepers, free memory, fetch, then send.

If checkpoint.has_peer_copies is false, there are no copies, and only the memory is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatrain.arena.capacity import MemoryNeeded, capacity_problem, free_memory_bytes
from megatrain.arena.directory import Arena
from megatrain.arena.slot_layout import Persist, SealedSnapshot
from megatrain.checkpoint.agreement import raised_by_all
from megatrain.checkpoint.attach import Attachment
from megatrain.checkpoint.copy_slots import NUM_COPY_SLOTS, missing_copy_bytes, removable_copies, remove_copies
from megatrain.checkpoint.peer_copies import PeerCopies, start_copies
from megatrain.checkpoint.peer_fetch import FetchPlan, adopt, fetch_missing, number_in_same_slot
from megatrain.checkpoint.peers import choose_keepers
from megatrain.checkpoint.snapshot_offer import PlannedSlot
from megatrain.checkpoint.start import StartingPoint
from megatrain.comm import Mesh
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.peers.link import PeerLimits

_CALL_S = 30.0
_AUTHENTICATION_S = 10.0


class JobPeers:
    """This rank's part in the copies at peers. All ranks call every method except `new_messages` together."""

    def __init__(self, config: Config, mesh: Mesh, local_rank: int, store_address: str) -> None:
        """store_address: host and port where the ranks of the job meet, "" when all of them are on this machine."""
        self._config = config
        self._mesh = mesh
        self._local_rank = local_rank
        self._store_address = store_address
        self._keepers: tuple[int, ...] = ()
        self._copies: PeerCopies | None = None

    @property
    def are_enabled(self) -> bool:
        """Return whether snapshots are copied to peers at all."""
        return self._config.checkpoint.has_peer_copies

    def choose(self, hosts: Sequence[str]) -> None:
        """Choose the keeper of each rank's copies.

        Raises: TopologyError, the same on every rank, when no placement is valid.
        """
        if self.are_enabled:
            self._keepers = choose_keepers(self._mesh.layout, hosts)

    def free_memory(self, attachment: Attachment, own_bytes: int) -> None:
        """Remove copies that are no longer needed, and refuse to start when a host's memory cannot hold its snapshots.

        own_bytes: the memory that this rank's missing slots need.
        Communication: one agreement, one gather and one broadcast.
        Raises: ConfigError with the arithmetic, CheckpointError, the same on every rank.
        """
        arena, rank = attachment.arena, self._mesh.rank
        freed_bytes, copy_bytes = 0, 0
        with raised_by_all(self._mesh.cpu_groups, rank):
            if self._local_rank == 0:
                freed_bytes = self._remove_copies(attachment, needed=attachment.missing)
            if self.are_enabled:
                copy_bytes = missing_copy_bytes(arena, self._kept(attachment))
        check_capacity(
            arena,
            attachment.hosts,
            MemoryNeeded(own_bytes, copy_bytes),
            self._config.checkpoint.slots,
            rank,
            self._mesh.cpu_groups,
            freed_bytes=freed_bytes,
        )

    def fetch(self, attachment: Attachment, slots: Sequence[Path]) -> str | None:
        """Fetch missing snapshots into their ranks' own slots. Return the first error, the same on every rank, or None.

        Communication: none when every rank has its snapshot, else as `fetch_missing`.
        """
        memory = attachment.memory
        if memory is None or not attachment.missing:
            return None
        return fetch_missing(
            FetchPlan(memory, attachment.missing, attachment.hosts, attachment.plans),
            attachment.arena,
            slots[memory.snapshot.snapshot % len(slots)],
            self._mesh.rank,
            self._mesh.cpu_groups,
            network_interface=self._config.runtime.network_interface,
            store_address=self._store_address,
            # all ranks wait for the slowest one in an agreement, which times out after the full checkpoint_timeout_s
            limits=self._limits(self._config.runtime.checkpoint_timeout_s / 2),
        )

    def adopt(self, attachment: Attachment, slots: Sequence[Path], round_number: int, *, is_pending: bool) -> int:
        """Relabel the fetched snapshot as one of this round, and return its number.

        is_pending: whether the writer is to store it, because storage does not have it.
        Communication: one agreement.
        Raises: CheckpointError, the same on every rank.
        """
        assert attachment.memory is not None
        before = attachment.memory.snapshot
        number = number_in_same_slot(before.snapshot, attachment.next_snapshot, len(slots))
        after = SealedSnapshot(before.step, round_number, number)
        owner = self._kept(attachment).owner
        copies = [attachment.arena.copy(owner, slot) for slot in range(NUM_COPY_SLOTS)]
        with raised_by_all(self._mesh.cpu_groups, self._mesh.rank):
            adopt(before, after, slots, copies, Persist.PENDING if is_pending else Persist.DONE)
        return number

    def start(self, attachment: Attachment, *, has_old: bool) -> None:
        """Begin to send and to keep copies. All fetches from this host must be complete.

        has_old: whether existing copies belong to the state from which this job resumed.
        Communication: as `start_copies`.
        Raises: CheckpointError, CommunicationError, the same on every rank.
        """
        if self._local_rank == 0:
            self._remove_copies(attachment, needed=())
        if self.are_enabled:
            self._copies = start_copies(
                attachment.arena,
                self._keepers,
                attachment.plans,
                self._mesh.rank,
                self._mesh.cpu_groups,
                network_interface=self._config.runtime.network_interface,
                store_address=self._store_address,
                limits=self._limits(self._config.runtime.checkpoint_timeout_s),
                has_old=has_old,
            )

    def offer(self, slot: Path | None) -> None:
        """Copy the snapshot in this slot to the keeper in the background. Returns at once."""
        if self._copies is not None and slot is not None:
            self._copies.offer(slot)

    def failure_number(self) -> int:
        """Return this rank's number if the last copy of its snapshot failed, else a number above those of all ranks.

        Without copies: 0.
        """
        return self._copies.failure_number() if self._copies is not None else 0

    def set_smallest_failure_number(self, smallest: int) -> None:
        """Record the smallest of all ranks' failure numbers."""
        if self._copies is not None:
            self._copies.set_smallest_failure_number(smallest)

    def new_messages(self) -> list[str]:
        """Return messages about changes in the copies of all ranks since the last call."""
        return self._copies.new_messages() if self._copies is not None else []

    def close(self) -> None:
        """Stop sending and keeping copies."""
        if self._copies is not None:
            self._copies.close()

    def _kept(self, attachment: Attachment) -> PlannedSlot:
        return attachment.plans[self._keepers.index(self._mesh.rank)]

    def _remove_copies(self, attachment: Attachment, needed: Sequence[int]) -> int:
        """Remove copies that this host does not keep. Those of `needed` ranks stay for now; return their bytes."""
        ranks = attachment.ranks_of_host(self._mesh.rank)
        kept = {self._keepers.index(rank) for rank in ranks} if self.are_enabled else set()
        now, later = removable_copies(attachment.arena.slots(), kept, needed)
        remove_copies(now)
        return sum(file.path.stat().st_size for file in later)

    def _limits(self, total_s: float) -> PeerLimits:
        return PeerLimits(min(_AUTHENTICATION_S, total_s), min(_CALL_S, total_s), total_s)


def fallback_start(start: StartingPoint, step: int, problem: str) -> StartingPoint:
    """Return the starting point in storage, with a warning that `step` in memory could not be completed from peers.

    Raises: CheckpointError when storage has nothing: starting from step 0 would discard the snapshots in memory.
    """
    if not start.candidates:
        raise CheckpointError(
            f"step {step} is in the memory of hosts, but a peer's copy of it did not arrive, and storage has no "
            f"checkpoint: {problem}; start again, or remove the arenas (megatrain-arena1.*) to start without them"
        )
    warning = f"WARNING: step {step} is in memory, but a peer's copy of it did not arrive: {problem}"
    return replace(start, warnings=(*start.warnings, warning))


def check_capacity(
    arena: Arena,
    hosts: Sequence[str],
    needed: MemoryNeeded,
    num_slots: int,
    rank: int,
    cpu_groups: CpuGroups,
    *,
    freed_bytes: int = 0,
) -> None:
    """Refuse to continue when a host's memory cannot hold the snapshots of its ranks.

    freed_bytes: memory that will be freed before new copies are made.
    Communication: one gather and one broadcast.
    Raises: ConfigError with the arithmetic, the same on every rank.
    """
    free = free_memory_bytes(arena.root) + freed_bytes
    gathered = cpu_groups.gather_json(rank, [needed.own_bytes, needed.copy_bytes, free])
    problem = None
    if gathered is not None:
        problem = capacity_problem(
            hosts,
            [MemoryNeeded(each[0], each[1]) for each in gathered],
            [each[2] for each in gathered],
            num_slots,
            str(arena.root.parent),
        )
    problem = cpu_groups.broadcast_json(problem)
    if problem is not None:
        raise ConfigError([problem])
