"""Reads pictures and captions of shards by sample number, and names what cannot be used."""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatrain.data.pictures.bad_picture import BadPicture, BadPictureError
from megatrain.data.pictures.picture_header import (
    PictureHeader,
    PictureHeaderError,
    checked_header,
    max_encoded_bytes,
)
from megatrain.data.pictures.picture_index import JSON_CAPTION, NO_CAPTION, IndexedShard, PictureIndex
from megatrain.data.pictures.shard import member_name

MAX_CAPTION_BYTES = 1 << 20
CAPTION_KEY = "caption"
"""The key of the caption in a .json member, as img2dataset writes it."""
_MAX_OPEN_SHARDS = 16


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """The file of a picture, its header, and the caption of the sample."""

    number: int
    content: bytes
    header: PictureHeader
    caption: str


class _MemberError(Exception):
    """Why a member cannot be used."""


class ShardReader:
    """Reads samples of an index. It keeps a few shards open."""

    def __init__(self, index: PictureIndex) -> None:
        self.index = index
        self._open: OrderedDict[str, BinaryIO] = OrderedDict()

    def read(self, number: int, max_pixels: int) -> EncodedPicture:
        """Read a sample, and check everything that can be checked without decoding the picture.

        Raises: BadPictureError naming the shard and the member; DataError as `PictureIndex.record`.
        """
        shard, record = self.index.record(number)
        is_caption = False
        try:
            content = self._content(shard, record, "", max_encoded_bytes(max_pixels))
            header = checked_header(content, max_pixels)
            is_caption = record["caption"] != NO_CAPTION
            caption = self._caption(shard, record)
        except (_MemberError, PictureHeaderError) as fault:
            raise BadPictureError(self.bad(number, str(fault), is_caption=is_caption)) from None
        return EncodedPicture(number, content, header, caption)

    def bad(self, number: int, reason: str, *, is_caption: bool = False) -> BadPicture:
        """Return the address of a sample that cannot be used, with the name of its picture or caption."""
        shard, record = self.index.record(number)
        header = int(record["caption_header" if is_caption else "header"])
        try:
            name = member_name(self._file(shard), header)
        except _MemberError:
            name = f"the member at byte {header}"
        return BadPicture(number, str(self.index.directory / shard.name), name, reason)

    def close(self) -> None:
        """Close the shards."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _caption(self, shard: IndexedShard, record: Any) -> str:
        if record["caption"] == NO_CAPTION:
            raise _MemberError("it has no caption: there is no .txt and no .json with the same key")
        content = self._content(shard, record, "caption_", MAX_CAPTION_BYTES)
        try:
            text: object = content.decode()
            if record["caption"] == JSON_CAPTION:
                values = json.loads(content)
                text = values.get(CAPTION_KEY) if isinstance(values, dict) else None
                str(text).encode()  # fails for half of a surrogate pair, which JSON can escape
        except (ValueError, RecursionError) as error:
            raise _MemberError(f"cannot be read as a caption: {type(error).__name__}") from None
        if not isinstance(text, str):
            raise _MemberError(f'has no text under the key "{CAPTION_KEY}"')
        return text

    def _content(self, shard: IndexedShard, record: Any, prefix: str, max_bytes: int) -> bytes:
        start, size = int(record[f"{prefix}start"]), int(record[f"{prefix}size"])
        if size > max_bytes:
            raise _MemberError(f"it has {size} bytes, and the limit is {max_bytes}")
        file = self._file(shard)
        try:
            file.seek(start)
            content = file.read(size)
        except OSError as error:
            raise _MemberError(f"cannot be read: {error.strerror}") from None
        if len(content) < size:
            raise _MemberError(f"it is cut off: it has {size} bytes, and the shard ends after {len(content)} of them")
        if zlib.crc32(content) != record[f"{prefix}crc"]:
            raise _MemberError("it has changed since the shard was indexed; copy the shard again, or index it again")
        return content

    def _file(self, shard: IndexedShard) -> BinaryIO:
        file = self._open.pop(shard.name, None)
        if file is None:
            path: Path = self.index.directory / shard.name
            try:
                file = path.open("rb")
            except OSError as error:
                raise _MemberError(f"the shard cannot be opened: {error.strerror}") from None
        self._open[shard.name] = file
        if len(self._open) > _MAX_OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return file
