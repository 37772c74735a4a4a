"""Fetch the blocks of remote files that the coming steps need, in several threads, while a step computes.

The steps are known in advance, so the blocks are, too. Blocks are fetched in the order in which they will be read:
those of the step that is being read, and a number of blocks of the steps after it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator

from megatrain.config.step_sequence import StepSequence
from megatrain.data.reader import BatchReader
from megatrain.data.remote_file import RemoteBlock
from megatrain.data.side_by_side import MOST_THREADS
from megatrain.programs.thread_limits import thread_error

_MOST_STEPS = 64
"""How far ahead of the current step blocks are searched: the next steps may read local files only."""


class Readahead:
    """Fetches the blocks of steps, at most `num_blocks` of those beyond the step that is being read.

    steps: the blocks of each step, from step `first` on; lazy, and iterated by one thread at a time.
    Raises: MegatrainError when a thread cannot be started.
    """

    def __init__(self, steps: Iterable[Iterable[RemoteBlock]], num_blocks: int, first: int = 0) -> None:
        self._reading = first - 1
        self._is_closed = False
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._due = self._due_blocks(steps, first, num_blocks)
        for number in range(min(num_blocks, MOST_THREADS)):
            # a daemon thread: one that waits for the storage must not keep an ending process alive
            thread = threading.Thread(target=self._run, name=f"data-readahead-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise thread_error(
                    "a thread that fetches remote data", error, "data.readahead_blocks=0 needs none"
                ) from error

    def advance(self, step: int) -> None:
        """State that a step is about to be read."""
        with self._changed:
            self._reading = max(self._reading, step)
            self._changed.notify_all()

    def close(self) -> None:
        """Let the threads end. One that waits for the storage ends after its block."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._turn:
                block = next(self._due, None)
            if block is None:
                return
            block.fetch()

    def _due_blocks(self, steps: Iterable[Iterable[RemoteBlock]], first: int, num_blocks: int) -> Iterator[RemoteBlock]:
        """Yield each block as soon as it may be fetched, until there are no more or `close` is called."""
        # the steps of the newest `num_blocks` blocks: another block must wait until the first of these steps is read
        recent = deque([first - 1] * num_blocks, num_blocks)
        for step, blocks in enumerate(steps, first):
            if not self._has_reached(step - _MOST_STEPS):
                return
            for block in dict.fromkeys(blocks):
                if not self._has_reached(min(step, recent[0])):
                    return
                recent.append(step)
                yield block

    def _has_reached(self, step: int) -> bool:
        """Wait until a step is read. Returns whether it is; False: `close` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._reading >= step)
            return not self._is_closed


def readahead(
    reader: BatchReader, steps: StepSequence, replica: int, num_blocks: int, first: int = 0
) -> Readahead | None:
    """Return the readahead of a replica's part of the steps from number `first` on; None if nothing is remote."""
    if not num_blocks or reader.cache_use is None:
        return None
    return Readahead((reader.remote_blocks(plan, replica) for plan in steps.plans(first)), num_blocks, first)
