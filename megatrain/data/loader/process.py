"""The data loader: the one process of a host that reads the steps of a round for its ranks.

    python -m megatrain.data.loader.process ARENA ROUND RING PARENT

It is a process and not a thread, so that it reads while ranks wait for each other or for a GPU, and so that the tokens
of a replica are read once for all its ranks. A rank starts the loader, with the loader's lock (Arena.loader_lock), the
rank's descriptor of the ring as RING, and the rank's process id as PARENT: the kernel kills the loader with that rank,
whose death ends the round. The loader has the priority of a rank, because all ranks wait for a batch that is late. Its
only state is the ring, so it may be killed at any moment.
Source: MegaScale sec. 3.4.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path

from megatrain.arena.directory import Arena, open_arena
from megatrain.arena.locks import WakeReader, wake
from megatrain.config.step_sequence import StepSequence
from megatrain.contracts.errors import CheckpointError, DataError, MegatrainError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.step_plan import StepPlan
from megatrain.data.cache_use import CacheUse
from megatrain.data.loader.decision import Fill, Idle, decide
from megatrain.data.loader.plan import LoaderPlan
from megatrain.data.loader.ring import Ring, map_ring
from megatrain.data.loader.ring_layout import RingLayout
from megatrain.data.loader_report import LoaderRead
from megatrain.data.readahead import Readahead, readahead
from megatrain.data.reader import BatchReader
from megatrain.data.step_batch import StepBatch
from megatrain.programs.background import lower_process_priority
from megatrain.programs.own_output import keep_own_log, log_line
from megatrain.programs.processes import install_parent_death_guard

_NICENESS = 0
_POLL_S = 1.0
"""Ranks wake the loader. The interval matters only after a person has removed its FIFO."""
_log = partial(log_line, "data loader")


class RingFiller:
    """Reads the steps that a ring lacks. open_reader: opens the token files, at the first read, and again if it
    failed."""

    def __init__(self, plan: LoaderPlan, ring: Ring, open_reader: Callable[[], BatchReader]) -> None:
        self._plan = plan
        self._ring = ring
        self._open_reader = cache(open_reader)
        self._plans = _RecentPlans(plan.steps, plan.depth)
        self._earlier_cache_use = ring.cache_use
        self._readaheads: dict[int, Readahead | None] = {}

    def next(self) -> Fill | Idle:
        """Return what to read next, from the words of the ring."""
        return decide(self._plan.shares, self._plan.steps.num_steps, self._plan.depth, self._ring.state())

    def fill(self, due: Fill) -> None:
        """Read a step of a share into its slot, or store the error of the read there."""
        started_ns = time.monotonic_ns()
        self._ring.begin(due.share, due.step)
        share, plan = self._plan.shares[due.share], self._plans.of(due.step)
        content: StepBatch | DataError
        try:
            reader = self._open_reader()
            if share.has_tokens:
                self._fetch_ahead(reader, due, share.replica)
            content = reader.read_step(
                plan, share.replica, has_tokens=share.has_tokens, has_patches=bool(share.encoders)
            )
        except DataError as error:
            content = error
        self._ring.put(due.share, due.step, content)
        num_bytes, producers = (content.num_bytes, content.producers) if isinstance(content, StepBatch) else (0, ())
        if isinstance(content, StepBatch) and content.cache_use is not None:
            self._ring.put_cache_use(CacheUse.sum((self._earlier_cache_use, content.cache_use)))
        read = LoaderRead(started_ns, time.monotonic_ns() - started_ns, num_bytes, producers)
        self._ring.put_read(due.share, due.step, read)
        self._ring.publish(due.share, due.step)

    def close(self) -> None:
        """End the threads that fetch ahead."""
        for ahead in self._readaheads.values():
            if ahead is not None:
                ahead.close()

    def _fetch_ahead(self, reader: BatchReader, due: Fill, replica: int) -> None:
        """Start to fetch what a share needs from object storage, beginning with the step that is read first."""
        if due.share not in self._readaheads:
            num_blocks = self._plan.readahead_blocks
            self._readaheads[due.share] = readahead(reader, self._plan.steps, replica, num_blocks, due.step)
        ahead = self._readaheads[due.share]
        if ahead is not None:
            ahead.advance(due.step)


class _RecentPlans:
    """The plans of a few steps, each made once if the steps are requested in order."""

    def __init__(self, steps: StepSequence, depth: int) -> None:
        self._steps = steps
        self._max_recent = 2 * depth
        self._coming: Iterator[StepPlan] = steps.plans()
        self._next = 0
        self._recent: dict[int, StepPlan] = {}

    def of(self, step: int) -> StepPlan:
        if step not in self._recent:
            if step != self._next:
                self._coming = self._steps.plans(step)
            self._recent[step], self._next = next(self._coming), step + 1
            if len(self._recent) > self._max_recent:
                del self._recent[min(self._recent)]
        return self._recent[step]


def load(arena: Arena, round_number: int, ring_file: int) -> None:
    """Fill the ring of a round until it has all the steps that ranks still need. ring_file: the ring's open file.

    Raises: CheckpointError when a file of the arena is missing or damaged.
    """
    with WakeReader(arena.loader_wake(round_number)) as waiting:
        path = arena.loader_plan(round_number)
        try:
            plan = LoaderPlan.from_json(path.read_bytes(), str(path))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        ring = map_ring(ring_file, RingLayout.of(plan))
        with closing(RingFiller(plan, ring, plan.open_reader)) as reads:
            while (due := reads.next()) is not Idle.COMPLETE:
                if isinstance(due, Fill):
                    reads.fill(due)
                    for reader in plan.shares[due.share].readers:
                        wake(arena.loader_reader_wake(round_number, reader))
                else:
                    waiting.wait(_POLL_S)


def main(arguments: list[str]) -> int:
    """Run the loader of a round. Returns the exit code."""
    try:
        directory, (round_number, ring_file, parent) = arguments[0], map(int, arguments[1:])
    except (IndexError, ValueError):
        print("usage: python -m megatrain.data.loader.process ARENA ROUND RING PARENT", file=sys.stderr)
        return ExitCode.USAGE
    install_parent_death_guard(parent)
    try:
        lower_process_priority(_NICENESS)
        _log(f"round {round_number} started")
        load(open_arena(Path(directory)), round_number, ring_file)
        _log(f"round {round_number}: all steps are read")
    except MegatrainError as error:
        _log(f"ended: {error}")
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    keep_own_log()
    sys.exit(main(sys.argv[1:]))
