"""Read the next steps in a background thread while the current one trains.

The plan of steps is known ahead, a pure function of the step number, so the thread needs no word from the trainer. An
error in it is raised where its step would have been delivered. Waiting shows as the time `next` takes: the caller has
the span for it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

from megatrain.data.reader import StepBatch

_logger = logging.getLogger(__name__)


class Prefetcher:
    """Delivers `read_step(cursor, global_batch_size)` for each pair of `steps`, in order, `prefetch` steps ahead.

    With `prefetch` 0 there is no thread and each step is read when it is asked for.
    """

    def __init__(
        self, read_step: Callable[[int, int], StepBatch], steps: Iterable[tuple[int, int]], prefetch: int
    ) -> None:
        self._read_step = read_step
        self._steps = iter(steps)
        self._prefetch = prefetch
        self._changed = threading.Condition()
        self._ready: deque[StepBatch | BaseException] = deque()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if prefetch > 0:
            # A daemon thread: a read that hangs in dead storage must not keep a failed process alive.
            self._thread = threading.Thread(target=self._read_ahead, name="data-prefetch", daemon=True)
            self._thread.start()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def next(self) -> StepBatch:
        """Return the next step's microbatches, waiting for them if need be.

        Raises: what reading the step raised; StopIteration when the plan has no more steps; RuntimeError after `close`.
        """
        if self._thread is None and not self._is_closed:
            return self._read_step(*next(self._steps))
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready) or self._is_closed)
            if self._is_closed:
                raise RuntimeError("the prefetcher is closed")
            first = self._ready[0]
            if isinstance(first, BaseException):
                raise first
            self._ready.popleft()
            self._changed.notify_all()
            return first

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread and drop what it had read. Calling it again does nothing."""
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _logger.warning("a data read has not returned for %.0f s; its thread is left behind", timeout_s)

    def _read_ahead(self) -> None:
        result: StepBatch | BaseException
        while True:
            try:
                result = self._read_step(*next(self._steps))
            except BaseException as error:  # noqa: BLE001 -- raised in the consumer, StopIteration too
                result = error
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) < self._prefetch or self._is_closed)
                if self._is_closed:
                    return
                self._ready.append(result)
                self._changed.notify_all()
            if isinstance(result, BaseException):
                return
