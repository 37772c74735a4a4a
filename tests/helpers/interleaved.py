"""Two programs that use one storage, in a chosen order of their reads, listings and changes, or in every order."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatrain.checkpoint_format.location import Location
from tests.helpers.hooked_location import READS, HookedLocation
from tests.helpers.waiting import DEADLINE_S, DeadlineError

Program = Callable[[Location], None]


@dataclass(frozen=True)
class Operation:
    """An operation of program 0 or 1 in its storage, as a hook sees it."""

    program: int
    action: str
    path: str

    def conflicts(self, other: Operation) -> bool:
        """Return whether the order of the two operations may matter on a local disk.

        A change affects its path, the paths below it and, since it may create directories, those above it; a removal
        affects the paths above it only for the listing of its directory, and for other changes.
        """
        if self.action in READS:
            return other.action not in READS and other.conflicts(self)
        if other.action in READS and self.action == "remove":
            is_listed = other.action == "list" and other.path == self.path.rpartition("/")[0]
            return is_listed or _is_at_or_below(other.path, self.path)
        return _is_at_or_below(other.path, self.path) or _is_at_or_below(self.path, other.path)


def _is_at_or_below(path: str, upper: str) -> bool:
    return upper in ("", path) or path.startswith(f"{upper}/")


class Interleaved:
    """Runs two programs in turn: `first` for turns[0] operations, `second` for turns[1], `first` for turns[2], and so
    on. After the last turn, or when the other program has ended, a program runs to its end."""

    def __init__(self, checkpoints: Location, first: Program, second: Program, turns: Sequence[int]) -> None:
        self._checkpoints = checkpoints
        self._programs = (first, second)
        self._turns = list(turns)
        self._left = self._turns.pop(0)
        self._running = 0
        self._has_ended = [False, False]
        self._changed = threading.Condition()
        self._operations: list[Operation] = []

    def run(self) -> list[Operation]:
        """Return the operations in their order. Raises: what one of the programs raised."""
        with ThreadPoolExecutor(2) as pool:
            ended = [pool.submit(self._run, number) for number in (0, 1)]
        for one in ended:
            one.result()
        return self._operations

    def _run(self, number: int) -> None:
        def hook(action: str, path: str) -> None:
            self._operate(Operation(number, action, path))

        try:
            self._await_turn(number)
            self._programs[number](HookedLocation(self._checkpoints, hook))
        finally:
            with self._changed:
                self._has_ended[number] = True
                self._running = 1 - number
                self._changed.notify_all()

    def _operate(self, operation: Operation) -> None:
        """Called before each operation of a program."""
        number = operation.program
        with self._changed:
            if self._left == 0 and not self._has_ended[1 - number]:
                self._left = self._turns.pop(0) if self._turns else -1
                self._running = 1 - number
                self._changed.notify_all()
        self._await_turn(number)
        self._left -= 1
        self._operations.append(operation)

    def _await_turn(self, number: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._running == number, timeout=DEADLINE_S):
                raise DeadlineError(f"program {number} never had its turn")


def explore(run: Callable[[tuple[int, ...]], Sequence[Operation]]) -> None:
    """Run two programs in every order in which each is delayed once: the first one before one of its operations, and
    the second one before one of its operations, until the first one has ended.

    `run` gets the turns, runs the programs from the start, and returns their operations in their order. Of orders that
    differ only in neighboring operations without a conflict, which have the same result, one is run (partial-order
    reduction).
    """
    found, held_at = run((sys.maxsize,)), 0
    whole = found
    while held_at is not None:
        found, until = whole, _next(_of(1, whole), 0, _of(0, whole)[held_at:])
        while until is not None:
            found = run((held_at, until))
            until = _next(_of(1, found), until, _of(0, found)[held_at:])
        # Here the second program has ended before operation `held_at` of the first one, or an equal order exists.
        held_at = _next(_of(0, found), held_at, _of(1, found))


def _of(program: int, operations: Sequence[Operation]) -> list[Operation]:
    return [one for one in operations if one.program == program]


def _next(operations: Sequence[Operation], begin: int, others: Sequence[Operation]) -> int | None:
    """Return the number of operations before the first one, from `begin` on, that conflicts with one of the others."""
    for number in range(begin, len(operations)):
        if any(operations[number].conflicts(other) for other in others):
            return number + 1
    return None
