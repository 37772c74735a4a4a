"""Files that are made piece by piece while they are sent: a few at a time, each with an end.

What they are made of stays in memory until the last piece is taken, half a gigabyte for the largest: who reads slowly,
or goes away in the middle, must hold it neither often nor for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from starlette.concurrency import iterate_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

_MOST_S = 600.0
"""A line that takes longer for the largest table is too slow for tables of that size."""


class Download(StreamingResponse):
    """The pieces of a file called `name`; they are let go of when it ends, in whatever way."""

    def __init__(
        self, pieces: Generator[str] | Generator[bytes], media_type: str, name: str, *, most_s: float = _MOST_S
    ) -> None:
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        super().__init__(iterate_in_threadpool(pieces), media_type=media_type, headers=headers)
        self._pieces, self._most_s = pieces, most_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._most_s):
                await super().__call__(scope, receive, send)
        finally:
            # a cancelled task is a cycle, and with it all that the generator holds, until the collector comes by
            self._pieces.close()
