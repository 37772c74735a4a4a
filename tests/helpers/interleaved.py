"""Two programs that use one storage, in a chosen order of their reads, listings and changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatrain.checkpoint_format.location import Location
from tests.helpers.hooked_location import HookedLocation
from tests.helpers.waiting import DEADLINE_S, DeadlineError

Program = Callable[[Location], None]


class Interleaved:
    """Runs two programs in turn: `first` for turns[0] operations, `second` for turns[1], `first` for turns[2], and so
    on. After the last turn, and when the other one has ended, a program runs to its end.
    """

    def __init__(self, checkpoints: Location, first: Program, second: Program, turns: Sequence[int]) -> None:
        self._checkpoints = checkpoints
        self._programs = (first, second)
        self._turns = list(turns)
        self._left = self._turns.pop(0)
        self._running = 0
        self._has_ended = [False, False]
        self._changed = threading.Condition()

    def run(self) -> None:
        """Raises: what one of the programs raised."""
        with ThreadPoolExecutor(2) as pool:
            ended = [pool.submit(self._run, number) for number in (0, 1)]
        for one in ended:
            one.result()

    def _run(self, number: int) -> None:
        try:
            self._await_turn(number)
            self._programs[number](HookedLocation(self._checkpoints, lambda action, path: self._operate(number)))
        finally:
            with self._changed:
                self._has_ended[number] = True
                self._running = 1 - number
                self._changed.notify_all()

    def _operate(self, number: int) -> None:
        """Called before each operation of a program."""
        with self._changed:
            if self._left == 0 and not self._has_ended[1 - number]:
                self._left = self._turns.pop(0) if self._turns else -1
                self._running = 1 - number
                self._changed.notify_all()
            self._left -= 1
        self._await_turn(number)

    def _await_turn(self, number: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._running == number, timeout=DEADLINE_S):
                raise DeadlineError(f"program {number} never had its turn")
