"""Stage 1: copy this rank's state into the host's memory, and have all ranks agree that it is whole.

The step pays for the copy and one small agreement. It waits for storage only while every slot holds a snapshot that the
writer has not finished; how often and how long is counted. Source: MegaScale sec. 4.4.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatrain.checkpoint.arena_slots import ArenaSlot, SnapshotLabel
from megatrain.comm.host_groups import HostGroups
from megatrain.contracts.arena import Arena, SealedSnapshot
from megatrain.contracts.arena_layout import Persist, SlotState
from megatrain.contracts.arena_slot import SlotReader
from megatrain.contracts.errors import CheckpointError, SaveError

_POLL_S = 0.002
_CALL_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class SnapshotTimes:
    """What a snapshot cost the step. `waited_s` is the part for want of a free slot."""

    step: int
    stall_s: float
    waited_s: float
    num_bytes: int

    @property
    def has_waited(self) -> bool:
        return self.waited_s > _POLL_S


class Snapshots:
    """This rank's slots, used in turn. All ranks call every method together."""

    def __init__(
        self,
        slots: Sequence[ArenaSlot],
        num_bytes: int,
        first_number: int,
        local_rank: int,
        host: HostGroups,
        call_writer: Callable[[], None],
        report: Callable[[], int],
        show_life: Callable[[], None],
    ) -> None:
        """call_writer: says to the host's writer process that there is work, and starts one where none runs.

        report: a number that this rank reports with each snapshot; all ranks learn the smallest.
        show_life: says, while this rank waits for storage, that it does not hang.
        """
        self._call_writer = call_writer
        self._slots = tuple(slots)
        self._num_bytes = num_bytes
        self._number = first_number
        self._local_rank = local_rank
        self._called_at = time.monotonic()
        self._host = host
        self._report = report
        self._show_life = show_life
        self._is_under_way = False
        self.smallest_report = 0
        """Of all ranks, at the last snapshot."""
        self.num_waits = 0
        """Snapshots that had to wait for storage."""

    def take(self, label: SnapshotLabel, timeout_s: float) -> SnapshotTimes:
        """Take a snapshot of the state as it is; `label.snapshot` is given here.

        Communication: one small all-reduce an axis.
        Raises: SaveError when no slot is free in time.
        """
        started = time.perf_counter()
        slot = self._slots[self._number % len(self._slots)]
        self._wait_until_free(slot, timeout_s)
        waited_s = time.perf_counter() - started
        slot.begin(label, self._number)
        slot.copy_out()
        # who says anything at all has a whole copy
        (self.smallest_report,) = self._host.minimum([self._report()])
        slot.seal()
        self._is_under_way = True
        self._called_at = time.monotonic()
        if self._local_rank == 0:
            self._call_writer()
        self._number += 1
        times = SnapshotTimes(label.step, time.perf_counter() - started, waited_s, self._num_bytes)
        self.num_waits += times.has_waited
        return times

    def newest(self) -> ArenaSlot | None:
        """Return the slot with the newest whole snapshot, None without one."""
        sealed = [slot for slot in self._slots if slot.words().state == SlotState.SEALED]
        return max(sealed, key=lambda slot: slot.words().snapshot, default=None)

    def pending(self) -> int | None:
        """Return the step of the newest snapshot that storage does not have yet, None without one."""
        steps = [slot.words().step for slot in self._slots if not slot.is_free()]
        return max(steps, default=None)

    def has_failed(self, step: int) -> bool:
        """Whether storage did not take this rank's snapshot of a step."""
        return any(
            words.step == step and words.state == SlotState.SEALED and words.persist == Persist.FAILED
            for words in (slot.words() for slot in self._slots)
        )

    def wait(self, timeout_s: float) -> bool:
        """Wait until storage has what was taken, or will not get it; return whether that came in time."""
        deadline = time.monotonic() + timeout_s
        while self.pending() is not None:
            if time.monotonic() > deadline:
                return False
            self._wait_a_little()
        return True

    def tend(self) -> None:
        """Call the writer now and then while storage wants something of this rank's: it may have been killed.

        It may be so between two ranks' slots: then the first rank is content, and another one has to call.
        """
        patience_s = _CALL_AGAIN_S * (1 + self._local_rank)
        if time.monotonic() - self._called_at > patience_s and self.pending() is not None:
            self._called_at = time.monotonic()
            self._call_writer()

    def has_arrived(self) -> bool:
        """Whether storage has, since the last call, come to have what was taken, or will not get it."""
        was_under_way, self._is_under_way = self._is_under_way, self._is_under_way and self.pending() is not None
        return was_under_way and not self._is_under_way

    def _wait_until_free(self, slot: ArenaSlot, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not slot.is_free() or _is_wanted_by_others(slot):
            if time.monotonic() > deadline:
                raise SaveError(
                    f"{slot.path}: its snapshot is not in storage after {timeout_s:g} s, so there is no room for the "
                    "next (runtime.checkpoint_timeout_s); see the writer's log, or save less often"
                )
            self._wait_a_little()

    def _wait_a_little(self) -> None:
        self._show_life()
        self.tend()
        time.sleep(_POLL_S)

    def close(self) -> None:
        """Let go of the memory. What is in the arena stays there."""
        for slot in self._slots:
            slot.close()


def _is_wanted_by_others(slot: ArenaSlot) -> bool:
    """Whether another rank of this host does not know yet what became of the snapshot in `slot`.

    A writer may have been killed between two ranks. The next one goes on from there, if all of the snapshot is left.
    """
    words = slot.words()
    if words.state != SlotState.SEALED:
        return False
    mine = SealedSnapshot(words.step, words.round, words.snapshot)
    # an arena that somebody has removed, or the slot of an earlier round that goes away, says nothing
    with suppress(CheckpointError):
        for file in Arena(slot.path.parent).slots():
            with suppress(CheckpointError), SlotReader(file.path) as reader:
                other = reader.words()
                is_same = SealedSnapshot(other.step, other.round, other.snapshot) == mine and not file.is_copy
                if is_same and other.state == SlotState.SEALED and other.persist == Persist.WANTED:
                    return True
    return False
