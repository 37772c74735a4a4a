"""Take a snapshot: copy this rank's state into the host's memory. All ranks then agree that the snapshot is complete.

A step waits for the copy and for one small agreement that every rank has copied. The agreement also covers whether
every rank's next slot is free; if one was not, the next snapshot begins with another agreement. A snapshot waits for
storage only while every slot holds a snapshot that the writer has not finished; the number and length of these waits
are recorded. Source: MegaScale sec. 4.4.

In these agreements the ranks also share which snapshots a host has failed to store. The writers' own marks are files in
storage: on a full disk they cannot be written, and the other hosts would keep their slots occupied for a checkpoint
that cannot be completed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatrain.arena.directory import Arena
from megatrain.arena.sealed import sealed_slots
from megatrain.arena.slot_layout import Persist
from megatrain.checkpoint.arena_slots import ArenaSlot, SnapshotLabel
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.contracts.errors import CheckpointError, SaveError

_POLL_S = 0.002
_WAKE_AGAIN_S = 1.0
_SHARE_AGAIN_S = 1.0
"""Longest pause between two agreements while any rank waits for storage."""


@dataclass(frozen=True, slots=True)
class SnapshotTimes:
    """The time that a snapshot cost the step. `waited_s` is the part spent waiting for a free slot."""

    step: int
    stall_s: float
    waited_s: float

    @property
    def has_waited(self) -> bool:
        return self.waited_s > _POLL_S


class Snapshots:
    """This rank's slots, used in turn. All ranks call every method together."""

    def __init__(
        self,
        slots: Sequence[ArenaSlot],
        first_number: int,
        rank: int,
        local_rank: int,
        cpu_groups: CpuGroups,
        wake_or_start_writer: Callable[[], None],
        failure_number: Callable[[], int],
        show_liveness: Callable[[], None],
    ) -> None:
        """wake_or_start_writer: wakes the host's writer process for new work, and starts one if none runs.

        failure_number: returns this rank's number if the last copy of its snapshot at a peer failed, else a number
        above those of all ranks. Each snapshot shares the minimum with all ranks: the lowest rank whose copy failed.
        show_liveness: signals, while this rank waits for storage, that it does not hang.
        """
        self._wake_or_start_writer = wake_or_start_writer
        self._slots = tuple(slots)
        self._number = first_number
        self._rank = rank
        self._local_rank = local_rank
        self._woken_at = time.monotonic()
        self._cpu_groups = cpu_groups
        self._failure_number = failure_number
        self._show_liveness = show_liveness
        self._is_under_way = False
        self._is_next_usable = False
        """Whether every rank found its next slot usable at the last snapshot; all ranks hold the same value."""
        self.smallest_failure_number = 0
        """The smallest failure number of all ranks at the last snapshot."""

    def take(self, label: SnapshotLabel, timeout_s: float) -> SnapshotTimes:
        """Take a snapshot of the current state, and number it.

        Communication: one small all-reduce per axis, and one more if a rank's slot was not free at the last snapshot;
        more while any rank waits for storage.
        Raises: SaveError, on every rank, when a rank has no free slot in time.
        """
        started = time.perf_counter()
        slot, following = (self._slots[number % len(self._slots)] for number in (self._number, self._number + 1))
        waited_s: float | None = 0.0
        if not self._is_next_usable:
            waited_s = self._wait_together(lambda: _is_usable(slot), timeout_s)
        if waited_s is None:
            self._check_all_usable(slot, timeout_s, is_usable=_is_usable(slot))
            waited_s = time.perf_counter() - started
        slot.begin(label, self._number)
        slot.copy_out()
        # a rank takes part in this agreement only after its copy is complete; a usable slot stays usable until its use
        is_next_usable = following is not slot and _is_usable(following)
        failure_number, next_usable, *kept = self._cpu_groups.minimum(
            [self._failure_number(), int(is_next_usable), *self._kept()]
        )
        self.smallest_failure_number, self._is_next_usable = failure_number, bool(next_usable)
        self._give_up(kept)
        slot.seal()
        self._is_under_way = True
        self._woken_at = time.monotonic()
        if self._local_rank == 0:
            self._wake_or_start_writer()
        self._number += 1
        return SnapshotTimes(label.step, time.perf_counter() - started, waited_s)

    def newest(self) -> ArenaSlot | None:
        """Return the slot with the newest complete snapshot, None without one."""
        sealed = [slot for slot in self._slots if slot.words().sealed is not None]
        return max(sealed, key=lambda slot: slot.words().snapshot, default=None)

    def pending(self) -> int | None:
        """Return the step of the newest snapshot that is still to be stored, None without one."""
        steps = [slot.words().step for slot in self._slots if not slot.is_free()]
        return max(steps, default=None)

    def has_failed(self, step: int) -> bool:
        """Return whether storing this rank's snapshot of a step failed."""
        return any(
            words.sealed is not None and words.step == step and words.persist == Persist.FAILED
            for words in (slot.words() for slot in self._slots)
        )

    def wait(self, timeout_s: float) -> bool:
        """Wait until all snapshots of all ranks are stored or have failed; return whether this happened in time.

        Communication: one small all-reduce per axis; more while any rank waits.
        """
        return self._wait_together(lambda: self.pending() is None, timeout_s) is not None

    def ensure_writer_runs(self) -> None:
        """Wake or start the writer periodically while a snapshot of this rank is not stored: it may have been killed.

        If it was killed between two ranks' slots, nothing is pending for the first rank, and another rank must do this.
        """
        patience_s = _WAKE_AGAIN_S * (1 + self._local_rank)
        if time.monotonic() - self._woken_at > patience_s and self.pending() is not None:
            self._woken_at = time.monotonic()
            self._wake_or_start_writer()

    def take_stored_event(self) -> bool:
        """Return whether the pending snapshots were stored, or failed, since the last call; each event counts once."""
        was_under_way, self._is_under_way = self._is_under_way, self._is_under_way and self.pending() is not None
        return was_under_way and not self._is_under_way

    def _wait_together(self, is_met: Callable[[], bool], timeout_s: float) -> float | None:
        """Wait until a condition holds on every rank; return for how long, None when it took too long.

        Meanwhile give up the snapshots that another host has failed to store.
        """
        deadline = time.monotonic() + timeout_s
        began: float | None = None
        while True:
            is_in_time = time.monotonic() <= deadline
            all_met, all_in_time, *kept = self._cpu_groups.minimum([int(is_met()), int(is_in_time), *self._kept()])
            self._give_up(kept)
            if all_met:
                return 0.0 if began is None else time.perf_counter() - began
            if not all_in_time:
                return None
            began = time.perf_counter() if began is None else began
            # also if this rank's slots are free: all ranks have just taken part, so none of them hangs
            self._show_liveness()
            until = min(time.monotonic() + _SHARE_AGAIN_S, deadline)
            while not is_met() and time.monotonic() < until:
                self._wait_a_little()

    def _check_all_usable(self, slot: ArenaSlot, timeout_s: float, *, is_usable: bool) -> None:
        """Raise on every rank if any slot is still taken. The last agreement may have freed slots, so check again."""
        problem = (
            f"{slot.path}: its snapshot is not in storage after {timeout_s:g} s, so there is no free slot for the next "
            "(runtime.checkpoint_timeout_s); see the writer's log, or save less often"
        )
        first = self._cpu_groups.agree(self._rank, None if is_usable else problem)
        if first is not None:
            raise SaveError(f"another rank waits for storage: {first}" if is_usable else problem)

    def _kept(self) -> list[int]:
        """Return 1 for each of the last snapshots, newest first, 0 where this host failed to store it."""
        return [int(slot.persist_of(number) != Persist.FAILED) for number, slot in self._last_snapshots()]

    def _give_up(self, kept: Sequence[int]) -> None:
        """Release the slots of snapshots that some host failed to store. This host's writer then stops waiting."""
        for (number, slot), is_kept in zip(self._last_snapshots(), kept, strict=True):
            if not is_kept and slot.persist_of(number) == Persist.PENDING:
                slot.give_up()

    def _last_snapshots(self) -> list[tuple[int, ArenaSlot]]:
        """Return the numbers of the snapshots that the slots may hold, newest first, each with its slot."""
        numbers = [self._number - age for age in range(1, len(self._slots) + 1)]
        return [(number, self._slots[number % len(self._slots)]) for number in numbers]

    def _wait_a_little(self) -> None:
        self._show_liveness()
        self.ensure_writer_runs()
        time.sleep(_POLL_S)

    def close(self) -> None:
        """Release the memory. The arena keeps its content."""
        for slot in self._slots:
            slot.close()


def _is_usable(slot: ArenaSlot) -> bool:
    return slot.is_free() and not _is_unstored_on_other_ranks(slot)


def _is_unstored_on_other_ranks(slot: ArenaSlot) -> bool:
    """Return whether the snapshot in `slot` is still to be stored from another rank's slot on this host.

    A writer may have been killed between two ranks' slots. The next writer continues if all ranks' slots still have the
    snapshot.
    """
    mine = slot.words().sealed
    if mine is None:
        return False
    # ignored: a removed arena, or a slot of an earlier round that is being removed
    with suppress(CheckpointError):
        others = sealed_slots(Arena(slot.path.parent))
        return any(other.snapshot == mine and other.words.persist == Persist.PENDING for other in others)
    return False
