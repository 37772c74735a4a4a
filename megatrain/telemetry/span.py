"""A span as a `with` block. Recorder.span opens it."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol


class EndsSpans(Protocol):
    """What ends a span by its token: the recorder."""

    def end(self, token: int, has_failed: bool = False) -> None: ...


class Span:
    """A span that is open from the call that makes it to the end of its `with` block."""

    __slots__ = ("_recorder", "_token")

    def __init__(self, recorder: EndsSpans, token: int) -> None:
        self._recorder = recorder
        self._token = token

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._recorder.end(self._token, kind is not None)
