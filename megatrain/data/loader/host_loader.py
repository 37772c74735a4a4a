"""The interface of a rank to the data loader of its host: waits for the next step in the ring, restarts a dead loader.

It has the interface of `Prefetcher`. The ranks of a host wake the loader through its FIFO, which also shows whether one
runs; the loader wakes a rank through the rank's own FIFO. The loader's lock decides which rank starts it: the program
inherits the lock of the rank that started it, so there is never a second one. It inherits the open ring too, whose file
is removed as soon as all ranks have opened it: the kernel frees its memory however the processes end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from megatrain.arena.capacity import free_memory_bytes
from megatrain.arena.directory import Arena
from megatrain.arena.locks import WakeReader, create_wake, hold_exclusively, wake
from megatrain.contracts.errors import CheckpointError, DataError
from megatrain.contracts.files.whole_files import write_private
from megatrain.data.loader.decision import Idle, decide
from megatrain.data.loader.plan import LoaderPlan
from megatrain.data.loader.ring import create_ring, map_ring, open_ring
from megatrain.data.loader.ring_layout import RingLayout
from megatrain.data.loader_report import LoaderReport
from megatrain.data.step_batch import StepBatch
from megatrain.formatting import bytes_text, count_text
from megatrain.programs.child_process import start_companion

_CHECK_S = 0.2
"""How often a rank that waits for a step checks whether the loader runs."""
_MAX_STARTS = 5
"""After this many starts of loaders that all died before they filled a slot, the ranks fail."""
_STOP_S = 5.0
_SPARE_BYTES = 64 << 20
_HINT = 'use data.loader="thread"'


@dataclass(frozen=True, slots=True)
class RingLocation:
    """The arena and the round of a ring. log: the file for the output of the loader."""

    arena: Arena
    round: int
    log: Path

    def problem_of_size(self, plan: LoaderPlan) -> str:
        """Return why the memory of the arena cannot hold the ring of a plan; empty if it can.

        Raises: CheckpointError when the arena cannot be accessed.
        """
        needed = RingLayout.of(plan).num_bytes
        try:
            free = free_memory_bytes(self.arena.root)
        except OSError as error:
            raise CheckpointError(f"{self.arena.root}: the arena cannot be accessed: {error.strerror}") from error
        if needed + _SPARE_BYTES <= free:
            return ""
        return (
            f'data.loader="host": this host needs {bytes_text(needed)} in {self.arena.root.parent} for '
            f"{count_text(plan.depth, 'step')} (data.prefetch={plan.depth - 1}) of "
            f"{count_text(len(plan.shares), 'replica')}, and {bytes_text(_SPARE_BYTES)} must stay free, but only "
            f"{bytes_text(free)} are free; use a smaller data.prefetch, more memory (/dev/shm is often smaller than "
            f"RAM), another checkpoint.arena_directory, or {_HINT}"
        )

    def create(self, plan: LoaderPlan) -> None:
        """Create the ring of a plan, after removing those of earlier rounds. One rank of the host does this.

        Raises: CheckpointError naming the file, or the memory that is missing. No file of the ring remains then.
        """
        try:
            self._create(plan)
        except CheckpointError:
            with suppress(CheckpointError):  # the error that led here matters more
                self.remove()
            raise

    def remove_ring(self) -> None:
        """Remove the file of the ring, which all ranks of the host have opened.

        Raises: CheckpointError when it cannot be removed.
        """
        path = self.arena.loader_ring(self.round)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed: {error.strerror}") from error

    def remove(self) -> None:
        """Remove all files of the data loaders of this round and of earlier ones.

        Raises: CheckpointError naming a file that cannot be removed.
        """
        self.arena.remove_loader_files(self.round)

    def _create(self, plan: LoaderPlan) -> None:
        self.remove()
        problem = self.problem_of_size(plan)
        if problem:
            raise CheckpointError(problem)
        create_ring(self.arena.loader_ring(self.round), RingLayout.of(plan))
        path = self.arena.loader_plan(self.round)
        try:
            write_private(path, plan.to_json().encode())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror}; {_HINT}") from error
        create_wake(self.arena.loader_wake(self.round))
        for reader in range(plan.num_readers):
            create_wake(self.arena.loader_reader_wake(self.round, reader))


class HostLoader:
    """Delivers the steps of a plan to one rank of the host. `reader`: the rank's index among the ranks of the host.

    A batch is valid until the next call of `next` or `close`: its tokens and patches are memory that all ranks of its
    replica map. source_names: the names of all sources, for the batches of a mixture.
    Raises: CheckpointError when the ring or a FIFO cannot be opened, or the ring is of another plan; DataError when the
    loader cannot be started.
    """

    def __init__(self, place: RingLocation, plan: LoaderPlan, reader: int, source_names: tuple[str, ...]) -> None:
        self._place = place
        self._plan = plan
        self._reader = reader
        self._share = plan.share_of(reader)
        self._reports_reads = plan.shares[self._share].readers[0] == reader
        self._num_reported = 0
        """The steps whose reads were reported."""
        self._source_names = source_names
        self._has_patches = reader in plan.shares[self._share].encoders
        self._ring_file = open_ring(place.arena.loader_ring(place.round))
        self._ring = map_ring(self._ring_file, RingLayout.of(plan))
        self._waiting = WakeReader(place.arena.loader_reader_wake(place.round, reader))
        self._plans = plan.steps.plans()
        self._step, self._step_plan = 0, next(self._plans, None)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        if reader == 0:
            self._wake_or_start_loader()

    def __enter__(self) -> HostLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if error is None and self._reader == 0:
            # after a common end, all ranks have mapped what they still use
            self._place.remove()

    def next(self, while_waiting: Callable[[], None] = lambda: None) -> StepBatch:
        """Return the next step's micro-batches; wait for them if necessary. The batch before it becomes invalid.

        while_waiting: is called repeatedly during the wait.
        Raises: DataError of the read, or when every restarted loader dies, a loader cannot be started, or its files
        were removed; StopIteration when there are no more steps; RuntimeError after `close`.
        """
        if self._is_closed:
            raise RuntimeError("the data loader is closed")
        if self._step_plan is None:
            raise StopIteration
        num_ready = self._ring.num_ready(self._share, self._step)
        self._ring.set_done(self._reader, self._step)
        self._wake_or_start_loader()
        while not self._ring.is_filled(self._share, self._step):
            if not self._waiting.wait(_CHECK_S):
                while_waiting()
                self._wake_or_start_loader()
        batch = self._ring.read(
            self._share, self._step, self._step_plan, self._source_names, has_patches=self._has_patches
        )
        cache_use = self._ring.cache_use if self._reader == 0 else None
        batch = replace(batch, loader=self._report(num_ready), cache_use=cache_use if any(cache_use or ()) else None)
        self._step, self._step_plan = self._step + 1, next(self._plans, None)
        return batch

    def close(self) -> None:
        """End the loader if this rank started it. A second call does nothing.

        All ranks of the host close together: after a common last step, or because the round is over.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._waiting.close()
        os.close(self._ring_file)
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _report(self, num_ready: int) -> LoaderReport:
        if not self._reports_reads:
            return LoaderReport(num_ready)
        # the loader does not write to these slots until this rank is done with them
        end = self._step + self._ring.num_ready(self._share, self._step)
        reads = tuple(self._ring.read_of(self._share, step) for step in range(self._num_reported, end))
        self._num_reported = end
        return LoaderReport(num_ready, reads, self._ring.num_starts)

    def _wake_or_start_loader(self) -> None:
        """Wake the loader. Start it if none runs although a rank still needs a step that no slot has."""
        place, plan = self._place, self._plan
        if wake(place.arena.loader_wake(place.round)):
            return
        if decide(plan.shares, plan.steps.num_steps, plan.depth, self._ring.state()) is Idle.COMPLETE:
            return
        if not place.arena.loader_plan(place.round).exists():
            raise DataError(f"{place.arena.root}: the files of the data loader were removed; start the job again")
        if plan.pictures is not None and not plan.pictures.may_open:
            return
        lock = hold_exclusively(place.arena.loader_lock(place.round))
        if lock is None:
            # a loader has just been started, and does not read its FIFO yet
            return
        with lock:
            starts = self._ring.count_start()
            if starts > _MAX_STARTS:
                raise DataError(
                    f"the data loader of this host ended {_MAX_STARTS} times before it had read step {self._step} of "
                    f"this round; see {place.log}, or {_HINT}"
                )
            command = [sys.executable, "-m", "megatrain.data.loader.process"]
            arguments = [str(place.arena.root), str(place.round), str(self._ring_file), str(os.getpid())]
            inherited = (lock.fileno(), self._ring_file)
            try:
                self._process = start_companion([*command, *arguments], place.log, "data-loader", inherited)
            except OSError as error:
                raise DataError(f"the data loader cannot be started: {error.strerror}; {_HINT}") from error
