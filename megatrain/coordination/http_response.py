"""Reading an HTTP/1.1 response from bytes as they come, without a socket.

The standard library's reader cannot go on after a time limit in the middle of a chunk, and its limit is for one read,
not for the whole. A watch needs the first, a deadline the second; so the socket is ours and this only takes bytes.
"""

from __future__ import annotations

import http.client
import io
from enum import Enum, auto

_MAX_HEAD_BYTES = 64 << 10
_MAX_CHUNK_LINE_BYTES = 4096


class GarbageError(Exception):
    """What came is no HTTP response."""


class _Part(Enum):
    HEAD = auto()
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()
    TRAILERS = auto()
    COUNTED_BODY = auto()
    BODY_TO_END = auto()
    COMPLETE = auto()


class HttpResponse:
    """One response. `feed` it what the socket gives; it returns what is body."""

    def __init__(self) -> None:
        self.status = 0
        self.is_last = False
        """Whether the server closes the connection after it."""
        self._part = _Part.HEAD
        self._buffer = bytearray()
        self._left = 0

    @property
    def has_head(self) -> bool:
        return self._part is not _Part.HEAD

    @property
    def is_complete(self) -> bool:
        return self._part is _Part.COMPLETE

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes, return those of the body among them. Raises: GarbageError."""
        self._buffer += data
        body = bytearray()
        while self._step(body):
            pass
        return bytes(body)

    def end(self) -> None:
        """Take notice that the connection ended. Raises: GarbageError when the response was not complete."""
        if self._part is _Part.BODY_TO_END:
            self._part = _Part.COMPLETE
        elif self._part is _Part.HEAD and not self._buffer:
            raise GarbageError("the connection was closed without an answer")
        elif self._part is not _Part.COMPLETE:
            raise GarbageError("the connection was closed in the middle of an answer")

    def _step(self, body: bytearray) -> bool:
        """Take one part from the buffer; return whether there may be another."""
        match self._part:
            case _Part.HEAD:
                return self._take_head()
            case _Part.CHUNK_SIZE:
                return self._take_chunk_size()
            case _Part.CHUNK_DATA | _Part.COUNTED_BODY:
                return self._take_counted(body)
            case _Part.CHUNK_END:
                line = self._line()
                if line:
                    raise GarbageError(f"a chunk is longer than its stated size: {line[:40]!r}")
                self._part = self._part if line is None else _Part.CHUNK_SIZE
                return line is not None
            case _Part.TRAILERS:
                line = self._line()
                self._part = _Part.COMPLETE if line == b"" else self._part
                return bool(line)
            case _Part.BODY_TO_END:
                body += self._buffer
                self._buffer.clear()
                return False
            case _Part.COMPLETE:
                if self._buffer:
                    raise GarbageError(f"bytes after the end of the answer: {bytes(self._buffer[:40])!r}")
                return False

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if not self._buffer.startswith(b"HTTP/1."[: len(self._buffer)]):
            raise GarbageError(f"the answer is no HTTP: {bytes(self._buffer[:40])!r}")
        if max(end, len(self._buffer) if end < 0 else 0) > _MAX_HEAD_BYTES:
            raise GarbageError(f"the head of the answer is longer than {_MAX_HEAD_BYTES} bytes")
        if end < 0:
            return False
        status_line, _, fields = bytes(self._buffer[: end + 4]).partition(b"\r\n")
        del self._buffer[: end + 4]
        words = status_line.split(None, 2)
        if len(words) < 2 or not words[1].isdigit() or len(words[1]) != 3:
            raise GarbageError(f"the answer has no status: {status_line[:40]!r}")
        status = int(words[1])
        if 100 <= status < 200:
            return True
        try:
            headers = http.client.parse_headers(io.BytesIO(fields))
        except http.client.HTTPException as error:
            raise GarbageError(f"the head of the answer is no HTTP: {error}") from error
        self.status = status
        connection = (headers.get("Connection") or "").lower()
        self.is_last = "close" in connection or (words[0] == b"HTTP/1.0" and "keep-alive" not in connection)
        length = headers.get("Content-Length")
        if (headers.get("Transfer-Encoding") or "").lower() == "chunked":
            self._part = _Part.CHUNK_SIZE
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise GarbageError(f"Content-Length {length[:40]!r} is no number")
            self._count_body(int(length))
        elif status in (204, 304):
            self._part = _Part.COMPLETE
        else:
            self._part = _Part.BODY_TO_END
            self.is_last = True
        return True

    def _count_body(self, length: int) -> None:
        self._left = length
        self._part = _Part.COUNTED_BODY if length else _Part.COMPLETE

    def _take_chunk_size(self) -> bool:
        line = self._line()
        if line is None:
            return False
        digits = line.partition(b";")[0].strip()
        # int() would take a sign, underscores and 0x as well
        if not digits or len(digits) > 15 or digits.strip(b"0123456789abcdefABCDEF"):
            raise GarbageError(f"no chunk size: {line[:40]!r}")
        self._left = int(digits, 16)
        self._part = _Part.CHUNK_DATA if self._left else _Part.TRAILERS
        return True

    def _take_counted(self, body: bytearray) -> bool:
        taken = self._buffer[: self._left]
        body += taken
        del self._buffer[: len(taken)]
        self._left -= len(taken)
        if self._left:
            return False
        self._part = _Part.CHUNK_END if self._part is _Part.CHUNK_DATA else _Part.COMPLETE
        return True

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end > _MAX_CHUNK_LINE_BYTES or (end < 0 and len(self._buffer) > _MAX_CHUNK_LINE_BYTES):
            raise GarbageError("no end of line where one belongs")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line
