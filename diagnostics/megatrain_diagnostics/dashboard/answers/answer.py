"""Answers as bytes: made once for all equal questions, identified by their ETag, never made twice at a time.

    parts.answers.get(("overview",), lambda: document_bytes(overview(...)), fresh_s=1.0)

The maker of a key works while the others who want it wait for its result. An answer without recent requests is
forgotten when the cache is full.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from megatrain_diagnostics.dashboard.answers.document import Document

JSON_TYPE = "application/json"
ARRAYS_TYPE = "application/x-megatrain-arrays"
_CAPACITY_BYTES = 64 * 2**20
_NUM_ANSWERS = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """A body and what names it."""

    body: bytes
    etag: str
    made_s: float
    """By the monotonic clock."""


class AnswerCache:
    """Keeps answers for a short time. For any threads."""

    def __init__(self, *, capacity_bytes: int = _CAPACITY_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity_bytes, self._clock = capacity_bytes, clock
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, Answer] = OrderedDict()
        self._made: dict[Hashable, Future[Answer]] = {}
        self._num_bytes = 0

    def get(self, key: Hashable, make: Callable[[], bytes], *, fresh_s: float = float("inf")) -> Answer:
        """Return the answer to `key`, made by `make` unless one not older than `fresh_s` is known.

        A key that holds the version of its data never grows old. What `make` raises, all who wait for it get.
        """
        with self._lock:
            known = self._known.get(key)
            if known is not None and self._clock() - known.made_s <= fresh_s:
                self._known.move_to_end(key)
                return known
            future = self._made.get(key)
            is_ours = future is None
            if future is None:
                future = self._made[key] = Future()
        return self._make(key, make, future) if is_ours else future.result()

    def _make(self, key: Hashable, make: Callable[[], bytes], future: Future[Answer]) -> Answer:
        # as old as the moment at which its maker began to look
        began_s = self._clock()
        try:
            body = make()
            answer = Answer(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"', began_s)
        except BaseException as error:
            with self._lock:
                del self._made[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._made[key]
            self._keep(key, answer)
        future.set_result(answer)
        return answer

    def _keep(self, key: Hashable, answer: Answer) -> None:
        before = self._known.pop(key, None)
        self._num_bytes += len(answer.body) - (len(before.body) if before is not None else 0)
        self._known[key] = answer
        while self._known and (self._num_bytes > self._capacity_bytes or len(self._known) > _NUM_ANSWERS):
            _, forgotten = self._known.popitem(last=False)
            self._num_bytes -= len(forgotten.body)


def document_bytes(document: Document) -> bytes:
    """Return a document as it is sent."""
    return document.model_dump_json().encode()


def document_answer(document: Document) -> Response:
    """Return the response with a document that is not cached."""
    return Response(document_bytes(document), media_type=JSON_TYPE)


def cached_answer(request: Request, answer: Answer, media_type: str = JSON_TYPE) -> Response:
    """Return the response with a shared answer; without its body for an asker who has it already."""
    if answer.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"etag": answer.etag})
    return Response(answer.body, media_type=media_type, headers={"etag": answer.etag})
