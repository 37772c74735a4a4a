"""Fetch the blocks of remote files that the coming steps need, in several threads, while a step computes.

The steps are known in advance, so the blocks are, too. Blocks are fetched in the order in which they will be read:
those of the step that is being read, and a number of blocks of the steps behind it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable

from megatrain.config.step_sequence import StepSequence
from megatrain.data.reader import BatchReader
from megatrain.data.remote_tokens import RemoteBlock
from megatrain.data.side_by_side import MOST_THREADS
from megatrain.programs.thread_limits import thread_error

_MOST_STEPS = 64
"""Steps that are looked at ahead: the next ones may read local files only."""


class Readahead:
    """Fetches the blocks of steps, at most `num_blocks` of those beyond the step that is being read.

    steps: the blocks of each step, from step `first` on; lazy, and iterated by one thread at a time.
    Raises: MegatrainError when a thread cannot be started.
    """

    def __init__(self, steps: Iterable[Iterable[RemoteBlock]], num_blocks: int, first: int = 0) -> None:
        self._num_blocks = num_blocks
        self._changed = threading.Condition()
        self._steps = iter(steps)
        self._found: deque[tuple[int, RemoteBlock]] = deque()
        self._last = first - 1
        """The last step whose blocks are known."""
        self._reading = first - 1
        self._taken: Counter[int] = Counter()
        """The blocks beyond the step that is being read, by step."""
        self._is_closed = False
        for number in range(min(num_blocks, MOST_THREADS)):
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
            self._taken = Counter({of: count for of, count in self._taken.items() if of > self._reading})
            self._changed.notify_all()

    def close(self) -> None:
        """Let the threads end. One that waits for the storage ends after its block."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (block := self._take()) is not None:
            block.fetch()

    def _take(self) -> RemoteBlock | None:
        """Wait until a block may be fetched, and return it; None if there are no more."""
        with self._changed:
            while not self._is_closed:
                if not self._found and self._last < self._reading + _MOST_STEPS:
                    blocks = next(self._steps, None)
                    if blocks is None:
                        return None
                    self._last += 1
                    self._found.extend((self._last, block) for block in dict.fromkeys(blocks))
                elif self._found and (self._found[0][0] <= self._reading or self._taken.total() < self._num_blocks):
                    step, block = self._found.popleft()
                    if step > self._reading:
                        self._taken[step] += 1
                    return block
                else:
                    self._changed.wait()
        return None


def readahead(
    reader: BatchReader, steps: StepSequence, replica: int, num_blocks: int, first: int = 0
) -> Readahead | None:
    """Return the readahead of a replica's part of the steps from number `first` on; None if nothing is remote."""
    if not num_blocks or not reader.is_remote:
        return None
    return Readahead((reader.remote_blocks(plan, replica) for plan in steps.plans(first)), num_blocks, first)
