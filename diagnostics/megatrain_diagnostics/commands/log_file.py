"""Opens a log file, compressed or not, in UTF-8, UTF-16 or UTF-32; the reader receives UTF-8.

Logs of Windows tools and of some serial consoles are UTF-16, and rotated logs are compressed. Rules cannot match raw
bytes of either, so such a file is decoded, or refused with an error.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatrain.compression import kind_of_content, opened_by_content
from megatrain.contracts.errors import DataError

_START_BYTES = 4096
_MAX_CONTROL_SHARE = 0.05
"""Limit of the fraction of control characters. Random bytes, as in compressed data, have about twice as many."""
_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
"""Byte order marks. The mark of UTF-32 begins with the mark of UTF-16, so UTF-32 comes first."""
# without NUL, because a crash can leave blocks of NULs in a log
_CONTROL = bytes({*range(1, 32), 127} - {*b"\t\n\v\f\r\b\x1b"})


@contextmanager
def opened_log(path: Path) -> Iterator[BinaryIO]:
    """Open a log for reading; the block receives UTF-8, uncompressed.

    Raises: DataError when the file cannot be read, is damaged, or is not text.
    """
    with opened_by_content(path) as file:
        yield as_utf8(file, str(path))


def as_utf8(file: BinaryIO, name: str) -> BinaryIO:
    """Return a file object that reads the text of `file` as UTF-8.

    Raises: DataError with `name` when the content is compressed, or not text.
    """
    buffered = cast("io.BufferedReader", file) if hasattr(file, "peek") else io.BufferedReader(cast("Any", file))
    start = buffered.peek(_START_BYTES)[:_START_BYTES]
    kind = kind_of_content(start)
    if kind:
        raise DataError(f"{name}: its content is that of a {kind} file, not of a log; unpack it first")
    encoding = next((encoding for bom, encoding in _BOMS if start.startswith(bom)), None) or _without_bom(start)
    if encoding is not None:
        return io.BufferedReader(_Decoded(buffered, encoding))
    num_control = len(start) - len(start.translate(None, _CONTROL))
    if num_control > _MAX_CONTROL_SHARE * len(start):
        raise DataError(
            f"{name}: {num_control} of its first {len(start)} bytes are control characters, so it is not a text log;"
            " convert it to text first"
        )
    return buffered


def _without_bom(start: bytes) -> str | None:
    """Return the UTF-16 encoding if nearly every other byte is NUL, as in text with Latin letters; else None."""
    even, odd = start[0::2], start[1::2]
    if len(odd) >= 2 and odd.count(0) > 0.7 * len(odd) and even.count(0) < 0.3 * len(even):
        return "utf-16-le"
    if len(odd) >= 2 and even.count(0) > 0.7 * len(even) and odd.count(0) < 0.3 * len(odd):
        return "utf-16-be"
    return None


class _Decoded(io.RawIOBase):
    """Reads a file in another encoding as UTF-8. Invalid bytes become U+FFFD."""

    def __init__(self, file: io.BufferedReader, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._ready = b""
        self._is_at_end = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._is_at_end:
            raw = self._file.read(io.DEFAULT_BUFFER_SIZE)
            self._is_at_end = not raw
            self._ready = self._decoder.decode(raw, final=not raw).encode("utf-8", "replace")
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)
