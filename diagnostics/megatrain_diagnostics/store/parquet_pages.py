"""Reads the unpacked sizes of the pages of a Parquet file from the page headers: the footer may state a smaller size.

A Parquet reader allocates the size in a page header, up to 2 GB, before it unpacks the page. A page header is a struct
in Thrift's compact protocol (PageHeader of parquet.thrift): field 2 is the unpacked length, field 3 the length in the
file. Other fields are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow.parquet as pq

_MAX_PAGES = 200_000
_HEAD_BYTES = 1 << 16
"""Limit of a page header. Its statistics take a few kilobytes at most."""
_MAX_DEPTH = 8
_UNPACKED, _PACKED = 2, 3
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY = range(9)
_STRUCT = 12
_LENGTHS = {_TRUE: 0, _FALSE: 0, _BYTE: 1, _DOUBLE: 8}


def unpacked_bytes(file: BinaryIO, metadata: pq.FileMetaData) -> Iterator[int]:
    """Yield the unpacked size of each page of a file. Raises: ValueError for invalid page headers; OSError."""
    num_pages = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            place = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)
            end = place + chunk.total_compressed_size
            while place < end:
                num_pages += 1
                if num_pages > _MAX_PAGES:
                    raise ValueError(f"more than {_MAX_PAGES} pages")
                file.seek(place)
                head = _PageHead(file.read(_HEAD_BYTES))
                yield head.unpacked
                place += head.num_bytes + head.packed


class _PageHead:
    """The page header at the start of `raw`."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0
        self.unpacked = self.packed = -1
        try:
            self._struct(0)
        except IndexError as error:
            raise ValueError("a page with a truncated or overlong header") from error
        if min(self.unpacked, self.packed) < 0:
            raise ValueError("a page whose header contains no size")
        self.num_bytes = self._at

    def _struct(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError("a page whose header is nested too deeply")
        number = 0
        while (start := self._byte()) != _STOP:
            kind, step = start & 15, start >> 4
            number = number + step if step else self._zigzag()
            if depth == 0 and kind == _I32 and number in (_UNPACKED, _PACKED):
                value = self._zigzag()
                self.unpacked, self.packed = (value, self.packed) if number == _UNPACKED else (self.unpacked, value)
            else:
                self._pass(kind, depth)

    def _pass(self, kind: int, depth: int) -> None:
        if kind in _LENGTHS:
            self._skip(_LENGTHS[kind])
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _BINARY:
            self._skip(self._varint())
        elif kind == _STRUCT:
            self._struct(depth + 1)
        else:  # lists, sets and maps, which a page header does not have
            raise ValueError(f"a page whose header has a field of type {kind}")

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._raw):
            raise IndexError

    def _byte(self) -> int:
        value = self._raw[self._at]
        self._at += 1
        return value

    def _varint(self) -> int:
        value = shift = 0
        while (part := self._byte()) & 128:
            value |= (part & 127) << shift
            shift += 7
            if shift > 63:
                raise ValueError("a page whose header has an unterminated number")
        return value | part << shift

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
