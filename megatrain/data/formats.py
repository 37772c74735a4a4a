"""Readers of text and JSON files: generators of records.

Only a .json file that is one array is read into memory as a whole. Errors name the exact location: file and line, or
file and element. A long .txt file is cut into several records, at blank lines if possible, so that memory stays bounded
and a corpus of one file can be split.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from megatrain.compression import opened
from megatrain.contracts.errors import DataError
from megatrain.data.input_file import InputFile

LONGEST_PIECE_BYTES = 65536
"""A .txt file of at most this size is one document; a longer file is several."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_START_BYTES = 4096


def empty(path: InputFile) -> DataError:
    """Return the error for a file without any text."""
    return DataError(f"{path}: holds no text; remove the file from the input or fill it")


def read_txt(path: InputFile, text_key: str) -> Iterator[str]:
    """Yield the file's text, in pieces if it is longer than LONGEST_PIECE_BYTES. `text_key` has no effect.

    Raises: DataError when the file is unreadable, without text, or not UTF-8.
    """
    num_lines = 0
    has_text = False
    with opened(path) as file:
        for piece in _pieces(file):
            try:
                text = piece.decode("utf-8")
            except UnicodeDecodeError as error:
                line = num_lines + piece.count(b"\n", 0, error.start) + 1
                raise not_utf8(f"{path}:{line}", error) from error
            num_lines += piece.count(b"\n")
            if text.strip():
                has_text = True
                yield text
    if not has_text:
        raise empty(path)


def read_jsonl(path: InputFile, text_key: str) -> Iterator[str]:
    """Yield the value of `text_key` of each line; blank lines are skipped.

    Raises: DataError when the file is unreadable or has no records, or a line is not UTF-8, is not a JSON object, or
    has no text under the key.
    """
    with opened(path) as file:
        yield from _lines(file, path, text_key)


def read_json(path: InputFile, text_key: str) -> Iterator[str]:
    """Yield the texts of a .json file: one array of objects, or JSON lines under the name .json.

    Raises: DataError as `read_jsonl`.
    """
    with opened(path) as file:
        start = file.read(_START_BYTES).removeprefix(_BYTE_ORDER_MARK)
        if not start.lstrip().startswith(b"["):
            yield from _lines(_Rest(start, file), path, text_key)
            return
        records = _parsed(start + file.read(), str(path))
    if not records:
        raise empty(path)
    for number, record in enumerate(records):
        yield _text_of(record, text_key, f"{path}: element {number}")


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the file's bytes in pieces that end after a blank line, else after a line, else between two characters."""
    pending = file.read(LONGEST_PIECE_BYTES).removeprefix(_BYTE_ORDER_MARK)
    while pending:
        block = file.read(LONGEST_PIECE_BYTES)
        if not block:
            yield pending
            return
        pending += block
        while len(pending) > LONGEST_PIECE_BYTES:
            cut = _cut(pending)
            yield pending[:cut]
            pending = pending[cut:]


def _cut(text: bytes) -> int:
    for separator in (b"\n\n", b"\n"):
        # A cut in the first half could make many short pieces.
        at = text.rfind(separator, LONGEST_PIECE_BYTES // 2, LONGEST_PIECE_BYTES)
        if at >= 0:
            return at + len(separator)
    # Go back over up to three continuation bytes (0b10xxxxxx) to the first byte of a UTF-8 character.
    for at in range(LONGEST_PIECE_BYTES, LONGEST_PIECE_BYTES - 4, -1):
        if text[at] & 0xC0 != 0x80:
            return at
    return LONGEST_PIECE_BYTES


class _Rest:
    """The lines of a file from which the first bytes (`start`) have already been read."""

    def __init__(self, start: bytes, file: BinaryIO) -> None:
        self._start = start
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        *whole, last = self._start.splitlines(keepends=True) or [b""]
        yield from whole
        if last.endswith(b"\n"):
            yield last
        elif line := last + self._file.readline():
            yield line
        yield from self._file


def _lines(lines: Iterable[bytes], path: InputFile, text_key: str) -> Iterator[str]:
    num_records = 0
    for line_number, line in enumerate(lines, 1):
        if line_number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line.strip():
            num_records += 1
            location = f"{path}:{line_number}"
            yield _text_of(_parsed(line, location), text_key, location)
    if num_records == 0:
        raise empty(path)


def _parsed(content: bytes, location: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(location, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{location}: is not JSON ({error}); each line must be one JSON object, or the file one array of them"
        ) from error


def _text_of(record: object, text_key: str, location: str) -> str:
    if not isinstance(record, dict):
        raise DataError(f"{location}: is {kind_of(record)}; each record must be one JSON object")
    if text_key not in record:
        keys = ", ".join(map(str, record)) or "none"
        raise DataError(f"{location}: has no key {text_key!r} (keys: {keys}); name the text's key with --text-key")
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(f"{location}: the value of {text_key!r} is {kind_of(text)}, but must be text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{location}: {text_key!r} holds half of a surrogate pair, which is not a character") from error
    return text


def not_utf8(location: str, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(
        f"{location}: is not UTF-8 (byte 0x{byte:02x}: {error.reason}); convert it, for example with iconv"
    )


def kind_of(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
