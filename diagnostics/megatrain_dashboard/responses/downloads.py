"""Files that are made piece by piece while they are sent. Their number at a time is limited, and each has a deadline.

The source data stays in memory until the last piece is sent; for the largest file it is half a gigabyte. The two limits
bound the memory that slow or disconnected clients hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from starlette.concurrency import iterate_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

_MAX_S = 600.0
"""A connection that needs longer for the largest table is too slow for tables of that size."""


class Download(StreamingResponse):
    """The pieces of a file called `name`. Their memory is freed when the response ends for any reason."""

    def __init__(
        self, pieces: Generator[str] | Generator[bytes], media_type: str, name: str, *, most_s: float = _MAX_S
    ) -> None:
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        super().__init__(iterate_in_threadpool(pieces), media_type=media_type, headers=headers)
        self._pieces, self._most_s = pieces, most_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._most_s):
                await super().__call__(scope, receive, send)
        finally:
            # a cancelled task is a reference cycle: without this, all that the generator holds would stay in memory
            # until the next garbage collection
            self._pieces.close()
