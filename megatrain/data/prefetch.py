"""Read the next steps in a background thread while the current step trains.

The steps are known in advance, so the thread needs no message from the trainer. An error of the thread is raised by
`next`, in place of the step that could not be read. The time that `next` takes is the wait for data; the caller records
the span for it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from megatrain.contracts.closable import Closable
from megatrain.contracts.step_plan import StepPlan
from megatrain.data.readahead import Readahead
from megatrain.data.step_batch import StepBatch
from megatrain.programs.thread_limits import thread_error

_logger = logging.getLogger(__name__)
_SIGN_S = 0.5
"""How often a rank that waits for a step shows that it waits."""


class Prefetcher(Closable):
    """Delivers `read_step(plan)` for each of `plans`, in their order, `prefetch` steps ahead.

    With `prefetch` 0 there is no thread, and each step is read when it is requested. readahead: fetches what the steps
    need from object storage; its first step is that of `plans`.
    Raises: MegatrainError when the thread cannot be started.
    """

    def __init__(
        self,
        read_step: Callable[[StepPlan], StepBatch],
        plans: Iterable[StepPlan],
        prefetch: int,
        readahead: Readahead | None = None,
    ) -> None:
        self._read_step = read_step
        self._plans = enumerate(plans)
        self._readahead = readahead
        self._prefetch = prefetch
        self._changed = threading.Condition()
        self._ready: deque[StepBatch | BaseException] = deque()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if prefetch > 0:
            # A daemon thread, because a read that hangs in unreachable storage must not keep a failed process alive.
            thread = threading.Thread(target=self._read_ahead, name="data-prefetch", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise thread_error(
                    "the thread that reads the next steps", error, "data.prefetch=0 needs none"
                ) from error
            self._thread = thread

    def next(self, while_waiting: Callable[[], None] = lambda: None) -> StepBatch:
        """Return the next step's micro-batches; wait for them if necessary.

        while_waiting: is called repeatedly during the wait, unless `prefetch` is 0.
        Raises: the error of the read; StopIteration when there are no more plans; RuntimeError after `close`.
        """
        if self._thread is None and not self._is_closed:
            return self._read()
        with self._changed:
            while not self._changed.wait_for(lambda: bool(self._ready) or self._is_closed, _SIGN_S):
                while_waiting()
            if self._is_closed:
                raise RuntimeError("the prefetcher is closed")
            first = self._ready[0]
            if isinstance(first, BaseException):
                raise first
            self._ready.popleft()
            self._changed.notify_all()
            return first

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread and drop the steps that it has read. A second call does nothing."""
        if self._readahead is not None:
            self._readahead.close()
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _logger.warning("a data read has not returned for %.0f s; its thread is abandoned", timeout_s)

    def _read(self) -> StepBatch:
        number, plan = next(self._plans)
        if self._readahead is not None:
            self._readahead.advance(number)
        return self._read_step(plan)

    def _read_ahead(self) -> None:
        result: StepBatch | BaseException
        while True:
            try:
                result = self._read()
            except BaseException as error:  # noqa: BLE001 -- `next` raises it in the consumer, StopIteration too
                result = error
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) < self._prefetch or self._is_closed)
                if self._is_closed:
                    return
                self._ready.append(result)
                self._changed.notify_all()
            if isinstance(result, BaseException):
                return
