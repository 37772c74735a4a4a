"""A cache of responses as bytes. A response is made once for all equal requests and is identified by its ETag.

    parts.responses.answer(request, ("overview",), lambda: overview(...), fresh_s=1.0)

One thread makes the response of a key; others that request the same key wait for its result. A full cache drops the
least recently used responses.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError
from starlette.requests import Request
from starlette.responses import Response

from megatrain_dashboard.responses.document import Document

JSON_TYPE = "application/json"
ARRAYS_TYPE = "application/x-megatrain-arrays"
_CAPACITY_BYTES = 64 * 2**20
_NUM_RESPONSES = 1000


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """A body and its ETag."""

    body: bytes
    etag: str
    made_s: float
    """Time on the monotonic clock."""
    media_type: str = JSON_TYPE


class ResponseCache:
    """Caches responses up to a number of bytes and entries. Thread-safe."""

    def __init__(self, *, capacity_bytes: int = _CAPACITY_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity_bytes, self._clock = capacity_bytes, clock
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, CachedResponse] = OrderedDict()
        self._made: dict[Hashable, Future[CachedResponse]] = {}
        self._num_bytes = 0

    def answer(
        self,
        request: Request,
        key: Hashable,
        make: Callable[[], Document | bytes],
        *,
        fresh_s: float = float("inf"),
    ) -> Response:
        """Answer a request with the response to `key`, as `get` does."""
        return cached_response(request, self.get(key, make, fresh_s=fresh_s))

    def get(
        self, key: Hashable, make: Callable[[], Document | bytes], *, fresh_s: float = float("inf")
    ) -> CachedResponse:
        """Return the response to `key`. `make` makes it, unless the cache has one that is at most `fresh_s` old.

        `make` returns a document, or a picture as a container of arrays. A key that contains the version of its data
        needs no `fresh_s`. If `make` raises an error, every waiting caller gets it.
        """
        with self._lock:
            known = self._known.get(key)
            if known is not None and self._clock() - known.made_s <= fresh_s:
                self._known.move_to_end(key)
                return known
            future = self._made.get(key)
            is_new = future is None
            if future is None:
                future = self._made[key] = Future()
        return self._make(key, make, future) if is_new else future.result()

    def _make(
        self, key: Hashable, make: Callable[[], Document | bytes], future: Future[CachedResponse]
    ) -> CachedResponse:
        # the age of a response counts from the moment at which its data was read
        began_s = self._clock()
        try:
            made = make()
            body, media_type = (made, ARRAYS_TYPE) if isinstance(made, bytes) else (document_bytes(made), JSON_TYPE)
            response = CachedResponse(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"', began_s, media_type)
        except BaseException as error:
            with self._lock:
                del self._made[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._made[key]
            self._keep(key, response)
        future.set_result(response)
        return response

    def _keep(self, key: Hashable, response: CachedResponse) -> None:
        before = self._known.pop(key, None)
        self._num_bytes += len(response.body) - (len(before.body) if before is not None else 0)
        self._known[key] = response
        while self._known and (self._num_bytes > self._capacity_bytes or len(self._known) > _NUM_RESPONSES):
            _, forgotten = self._known.popitem(last=False)
            self._num_bytes -= len(forgotten.body)


def document_bytes(document: Document) -> bytes:
    """Return a document as the bytes that are sent. In names of files, bytes that are not UTF-8 are escaped."""
    try:
        return document.model_dump_json().encode()
    except PydanticSerializationError:
        return json.dumps(_encodable(document.model_dump(mode="json")), allow_nan=False).encode()


def _encodable(value: Any) -> Any:
    """Return a JSON value in which every lone surrogate is escaped: Python uses them for bytes that are not UTF-8."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(inner) for name, inner in value.items()}
    return [_encodable(inner) for inner in value] if isinstance(value, list) else value


def file_version(path: Path) -> tuple[int, int] | None:
    """Return a part of a key that changes whenever a file grows; None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def document_response(document: Document) -> Response:
    """Return the response for a document that is not cached."""
    return Response(document_bytes(document), media_type=JSON_TYPE)


def cached_response(request: Request, cached: CachedResponse) -> Response:
    """Return the response to a request from the cache; 304 without a body for a client that already has it."""
    if cached.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"etag": cached.etag})
    return Response(cached.body, media_type=cached.media_type, headers={"etag": cached.etag})
