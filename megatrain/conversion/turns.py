"""Decides which file is written next when one process writes several files at once from the same stored items.

Each file is a sequence of parts, and each part needs some items. A part waits until every file that still needs its
items has reached a part that needs them. Then these files are written in turn while the items are in memory. So an item
is read once, however many files need it, and memory holds only the items of the current parts. If two files need items
in opposite orders, each would wait for the other. Then one of them goes first, and an item may be read again. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence


class Turns:
    """Gives turns to files, according to the items that their parts need."""

    def __init__(self, needs: Sequence[Sequence[Collection[int]]]) -> None:
        """needs: for each file, and each of its parts in order, the numbers of the items that the part needs."""
        self._needs = needs
        self._at = [0] * len(needs)
        self._last = 0
        self._num_uses: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        """By item and file: how many of the file's parts still need the item."""
        for file, parts in enumerate(needs):
            for numbers in parts:
                for number in numbers:
                    self._num_uses[number][file] += 1

    def take(self, is_kept: Callable[[int], bool]) -> int | None:
        """Return the file whose next part must be written now, or None when all are done.

        is_kept: returns whether an item is in memory.
        """
        num_files = len(self._needs)
        # starts with the file of the last turn, so that consecutive parts of a file are written together
        order = [(self._last + step) % num_files for step in range(num_files)]
        waiting = [file for file in order if self._at[file] < len(self._needs[file])]
        if not waiting:
            return None
        file = self._readiest(waiting, is_kept)
        self._finish(file)
        return file

    def _readiest(self, waiting: Sequence[int], is_kept: Callable[[int], bool]) -> int:
        for file in waiting:
            if all(map(is_kept, self._next(file))):
                return file
        for file in waiting:
            if self._is_met(file, is_kept):
                return file
        return waiting[0]

    def _next(self, file: int) -> Collection[int]:
        return self._needs[file][self._at[file]]

    def _is_met(self, file: int, is_kept: Callable[[int], bool]) -> bool:
        """Return whether every file that needs one of this file's next items, if not in memory, needs the item next."""
        return all(
            number in self._next(other)
            for number in self._next(file)
            if not is_kept(number)
            for other in self._num_uses[number]
        )

    def _finish(self, file: int) -> None:
        for number in self._next(file):
            uses = self._num_uses[number]
            uses[file] -= 1
            if not uses[file]:
                del uses[file]
        self._at[file] += 1
        self._last = file
