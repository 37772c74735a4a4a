"""The writer: the one process of a host that writes sealed snapshots from its arena to storage.

    python -m megatrain.checkpoint.writer ARENA_DIRECTORY

It is a process and not a thread, so that it survives its workers. It loads no torch, so that it is small and starts
fast. It handles one snapshot at a time, the oldest first, at the lowest priority. It reports failures in status.json
and on stderr; the job's next snapshot is the next attempt. When no worker has used the arena for keep_arena_s, it
removes the arena and exits. On SIGTERM it completes the current write and exits; the arena stays.
Source: MegaScale sec. 4.4.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from megatrain.arena.directory import Arena, open_arena, remove_arena, wake_writer
from megatrain.arena.locks import HeldLock, WakeReader, create_wake, hold_exclusively, is_held
from megatrain.arena.plans import WriterStatus
from megatrain.arena.sealed import SealedSlot, sealed_slots
from megatrain.arena.slot_file import write_persist
from megatrain.arena.slot_layout import Persist, SealedSnapshot
from megatrain.checkpoint.housekeeping import Housekeeping
from megatrain.checkpoint.known_plans import KnownPlans
from megatrain.checkpoint.persist import Persistence
from megatrain.checkpoint.persist_policy import (
    DueSnapshot,
    GivenUpSnapshot,
    is_pending,
    is_superseded,
    is_taken_over,
    next_due,
    to_give_up,
)
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.url_location import open_location
from megatrain.contracts.errors import CheckpointError, MegatrainError, MissingFileError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import bytes_text, seconds_text
from megatrain.programs.background import LOWEST_PRIORITY, lower_process_priority
from megatrain.programs.own_output import keep_own_log, log_line

_POLL_S = 1.0
"""Poll interval. Workers wake the writer; polling detects events without a wake-up, such as the exit of the workers."""
_log = partial(log_line, "checkpoint writer")


class CheckpointWriter:
    """The writer of an arena, whose lock the caller holds."""

    def __init__(
        self,
        arena: Arena,
        lock: HeldLock,
        open_checkpoints: Callable[[str], Location] = open_location,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena = arena
        self._lock = lock
        self._clock_s = clock_s
        self._open_checkpoints = open_checkpoints
        self._identity = os.stat(arena.root)
        self._plans = KnownPlans(arena, open_checkpoints)
        self._housekeeping = Housekeeping()
        self._with_outcome: frozenset[SealedSnapshot] = frozenset()
        """Snapshots in the slots that were stored or given up: not tried again even if a slot could not be marked."""
        self._idle_since: float | None = None
        self._is_stopping = False
        self._status = WriterStatus(
            pid=os.getpid(), branch="", round=0, num_persisted=0, num_failures=0, last_persisted_step=None,
            last_error="", last_write_s=0.0, last_write_bytes=0,
        )  # fmt: skip
        self._take_over()

    def _take_over(self) -> None:
        """Continue the previous writer's counts: its failures since the last stored checkpoint still count."""
        with suppress(CheckpointError):  # there was no previous writer
            before = WriterStatus.read(self._arena.writer_status)
            self._status = replace(
                self._status,
                last_error=before.last_error,
                num_failed=before.num_failed,
                failing_unix_s=before.failing_unix_s,
                persisted_unix_s=before.persisted_unix_s,
                last_persisted_step=before.last_persisted_step,
            )

    def stop(self) -> None:
        """Make `run` return after the current write. A signal handler calls this."""
        self._is_stopping = True
        wake_writer(self._arena)

    def run(self) -> None:
        """Store snapshots until this arena needs no writer any more, or until `stop`.

        Raises: CheckpointError when the arena cannot be used.
        """
        create_wake(self._arena.wake)
        with WakeReader(self._arena.wake) as wake:
            self._read_plan()
            self._report()
            while not self._is_over():
                if not self._do_next():
                    wake.wait(_POLL_S)

    def _do_next(self) -> bool:
        """Store one snapshot if one is due, and return whether one was."""
        self._read_plan()
        slots = self._open_slots()
        # read the slots first: a worker that seals a slot after that is still found here
        has_workers = is_held(self._arena.workers_lock)
        for given_up in to_give_up(slots, self._plans.by_round, has_workers=has_workers):
            self._fail(given_up)
        due = next_due(self._open_slots(), self._plans.by_round)
        if due is not None:
            self._persist(due)
        return due is not None

    def _open_slots(self) -> list[SealedSlot]:
        """Return the slots whose snapshots this writer has neither stored nor given up."""
        try:
            slots = sealed_slots(self._arena)
        except MissingFileError:
            # a user removed the arena meanwhile, which ends the loop at its next turn
            return []
        self._with_outcome &= {slot.snapshot for slot in slots}
        return [slot for slot in slots if slot.snapshot not in self._with_outcome]

    def _read_plan(self) -> None:
        problem = self._plans.read()
        if problem:
            _log(problem)

    def _persist(self, due: DueSnapshot) -> None:
        step, started = due.snapshot.step, time.perf_counter()
        try:
            checkpoints = self._open_checkpoints(due.plan.checkpoints)
            branch = self._plans.branch(due.plan)
            written = Persistence(
                self._arena, due, checkpoints, lambda: self._reason_to_stop_waiting(due), branch
            ).run()
        except CheckpointError as error:
            self._fail(GivenUpSnapshot(due.snapshot, due.slots, str(error)))
            return
        except Exception as error:  # noqa: BLE001 -- a bug in one write must not prevent the others
            _log(traceback.format_exc())
            self._fail(GivenUpSnapshot(due.snapshot, due.slots, f"{type(error).__name__}: {error}"))
            return
        self._record_outcome(due.snapshot, due.slots, Persist.DONE)
        self._status = replace(
            self._status,
            num_persisted=self._status.num_persisted + 1,
            last_persisted_step=step,
            last_error="",
            num_failed=0,
            failing_unix_s=None,
            persisted_unix_s=time.time(),
            last_write_s=written.write_s or self._status.last_write_s,
            last_write_bytes=written.num_bytes or self._status.last_write_bytes,
        )
        self._report()
        took = f"{bytes_text(written.num_bytes)} in {seconds_text(written.write_s)}"
        _log(
            f"step {step} of {due.plan.branch}: committed by round {due.snapshot.round} after"
            f" {time.perf_counter() - started:.2f} s ({took if written.num_bytes else 'was complete already'})"
        )
        for note in written.notes:
            _log(note)
        if due.plan.is_coordinator:
            for note in self._housekeeping.run(checkpoints, due.plan):
                _log(note)

    def _reason_to_stop_waiting(self, due: DueSnapshot) -> str:
        slots = self._open_slots()
        if is_superseded(due.snapshot, due.plan, slots):
            return "a newer round needs a checkpoint"
        return (
            ""
            if is_pending(due.snapshot, slots)
            else "the ranks gave this snapshot up, because another host failed to store it"
        )

    def _fail(self, given_up: GivenUpSnapshot) -> None:
        """Record that a snapshot will not be stored. It stays in its slots for a warm restore.

        If a newer round has adopted the snapshot, and stores it, this does not count as a failure.
        """
        if is_taken_over(given_up.snapshot, sealed_slots(self._arena)):
            _log(f"step {given_up.snapshot.step}: left to a newer round: {given_up.reason}")
            self._record_outcome(given_up.snapshot, given_up.slots, Persist.FAILED)
            return
        problem = f"step {given_up.snapshot.step}: not saved: {given_up.reason}"
        _log(problem)
        self._record_outcome(given_up.snapshot, given_up.slots, Persist.FAILED)
        self._status = replace(
            self._status,
            num_failures=self._status.num_failures + 1,
            last_error=problem,
            num_failed=self._status.num_failed + 1,
            failing_unix_s=self._status.failing_unix_s or time.time(),
        )
        self._report()

    def _record_outcome(self, snapshot: SealedSnapshot, slots: tuple[SealedSlot, ...], outcome: Persist) -> None:
        self._with_outcome |= {snapshot}
        for slot in slots:
            try:
                write_persist(slot.path, snapshot.snapshot, outcome)
            except CheckpointError as error:
                # most likely a worker is reusing the slot, so the outcome is not needed
                _log(f"{error} (its snapshot {snapshot.snapshot}: {outcome.name.lower()})")

    def _report(self) -> None:
        plan = self._plans.newest
        if plan is not None:
            self._status = replace(self._status, branch=plan.branch, round=plan.round)
        try:
            self._status.write(self._arena.writer_status)
        except CheckpointError as error:
            _log(str(error))

    def _is_over(self) -> bool:
        """Return whether the writer must exit. Removes the arena if it is no longer needed."""
        if self._is_stopping or not self._is_in_place():
            return True
        if is_held(self._arena.workers_lock):
            self._idle_since = None
            return False
        now = self._clock_s()
        if self._idle_since is None:
            self._idle_since = now
        plan = self._plans.newest
        keep_s = 0.0 if plan is None else plan.keep_arena_s
        if now - self._idle_since < keep_s or next_due(self._open_slots(), self._plans.by_round) is not None:
            return False
        if plan is None and self._plans.problem:
            # only a worker's plan contains how long to keep the arena's content
            return True
        return remove_arena(self._arena.root, self._lock)

    def _is_in_place(self) -> bool:
        """Return whether the arena is still the one whose lock this process holds: a user may have removed it."""
        try:
            return os.path.samestat(os.stat(self._arena.root), self._identity)
        except FileNotFoundError:
            return False


def main(arguments: list[str]) -> int:
    """Run the writer of the given arena, unless it has one already. Returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m megatrain.checkpoint.writer ARENA_DIRECTORY", file=sys.stderr)
        return ExitCode.USAGE
    try:
        arena = open_arena(Path(arguments[0]))
        lock = hold_exclusively(arena.writer_lock)
        if lock is None:
            return ExitCode.OK
        lower_process_priority(LOWEST_PRIORITY)
        writer = CheckpointWriter(arena, lock)

        def stop(number: int, frame: FrameType | None) -> None:
            writer.stop()

        signal.signal(signal.SIGTERM, stop)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _log(f"writer of {arena.root} started")
        writer.run()
    except MissingFileError as error:
        _log(f"ended: {error}")
    except MegatrainError as error:
        _log(f"ended: {error}")
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    keep_own_log()
    sys.exit(main(sys.argv[1:]))
