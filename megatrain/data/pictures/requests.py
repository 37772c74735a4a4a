"""The requests of one call, which several threads take, answer, or give back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.data.pictures.preparation import PreparedPicture
from megatrain.data.pictures.protocol import REQUEST_PICTURES


@dataclass(frozen=True, slots=True)
class TakenNumbers:
    """The numbers of a request. first: the place of the first one among the numbers of the call."""

    first: int
    numbers: tuple[int, ...]


class PictureRequests:
    """Divides numbers of samples into requests. Each request is with one thread at most. Thread-safe."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._changed = threading.Condition()
        self._waiting = deque(
            TakenNumbers(first, tuple(numbers[first : first + REQUEST_PICTURES]))
            for first in range(0, len(numbers), REQUEST_PICTURES)
        )
        self._num_unanswered = len(self._waiting)
        self._results: list[PreparedPicture | None] = [None] * len(numbers)
        self._is_stopped = False
        self._newest_answer_s = time.monotonic()

    def take(self, ready_s: float) -> TakenNumbers | None:
        """Return a request that no thread works on; None when all are answered, or after `stop`.

        ready_s: the time (time.monotonic) before which the caller takes none. The call also waits while other threads
        work on the last requests, because a thread gives back a request that fails.
        """
        with self._changed:
            while self._num_unanswered and not self._is_stopped:
                pause_s = ready_s - time.monotonic()
                if self._waiting and pause_s <= 0:
                    return self._waiting.popleft()
                self._changed.wait(pause_s if self._waiting else None)
        return None

    def store(self, taken: TakenNumbers, pictures: Sequence[PreparedPicture]) -> None:
        """Store the answer to a request."""
        with self._changed:
            self._results[taken.first : taken.first + len(taken.numbers)] = pictures
            self._num_unanswered -= 1
            self._newest_answer_s = time.monotonic()
            self._changed.notify_all()

    def give_back(self, taken: TakenNumbers) -> None:
        """Let the next thread answer a request."""
        with self._changed:
            self._waiting.appendleft(taken)
            self._changed.notify_all()

    def stop(self) -> None:
        """Let no thread take another request."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def seconds_without_answer(self) -> float:
        """Return how long ago the newest answer came, or the call began."""
        with self._changed:
            return time.monotonic() - self._newest_answer_s

    def results(self) -> list[PreparedPicture]:
        """Return the pictures in the order of the numbers. All requests must have been answered."""
        return [picture for picture in self._results if picture is not None]
