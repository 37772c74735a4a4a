"""A bound on questions that read many events: a few run, a few wait, and the rest are asked to try again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from megatrain_diagnostics.dashboard.answers.errors import unavailable

NUM_RUNNING = 3
"""Each may hold some 100 MB while it runs, and DuckDB uses all cores for one."""
NUM_WAITING = 24
WAIT_S = 20.0


NUM_DOWNLOADS = 2
"""Of files that are made while they are sent: what they are made of is held for as long as the asker takes."""


class HeavyQuestions:
    """Lets a few through at a time. Of one event loop."""

    def __init__(
        self,
        *,
        num_running: int = NUM_RUNNING,
        num_waiting: int = NUM_WAITING,
        wait_s: float = WAIT_S,
        refusal: str = "too many heavy questions are being answered; ask again in a moment",
    ) -> None:
        self._free = asyncio.Semaphore(num_running)
        self._num_waiting, self._most_waiting, self._wait_s = 0, num_waiting, wait_s
        self._refusal = refusal

    async def slot(self) -> AsyncIterator[None]:
        """Have a turn, as a dependency of a route. Raises: RefusalError, 503."""
        if self._free.locked() and self._num_waiting >= self._most_waiting:
            raise unavailable(self._refusal)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise unavailable("heavy questions of others take their time; ask again in a moment") from None
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._free.release()


def downloads() -> HeavyQuestions:
    """Return the bound on downloads. None waits: a waiting download would take a turn from other questions."""
    refusal = f"{NUM_DOWNLOADS} files are being downloaded already; try again when they are there"
    return HeavyQuestions(num_running=NUM_DOWNLOADS, num_waiting=0, refusal=refusal)
