"""The index of a directory of shards: sample number -> shard, picture and caption. One file beside the shards.

Little-endian: 8 bytes magic, uint64 version, uint64 size of the description, uint64 number of samples, uint32 CRC-32 of
this header and the description; the description, JSON: the shards with their sizes and digests; then the records
(RECORD_DTYPE) in the order of shards and members; then the sums of the records' blocks (block_sums.py). A record has
the CRC-32 of picture and caption, so a reader checks the bytes that it reads of a shard, and reads no others.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.contracts.files.whole_files import sync_directory, temporary_name
from megatrain.contracts.natural_order import natural_order
from megatrain.data.block_sums import SUM_DTYPE, SummedContent, SummingWriter, num_blocks
from megatrain.data.pictures.shard import JSON_KIND, ScannedShard, ShardSample, scan_shard, split_name
from megatrain.data.token_file import map_file

INDEX_NAME = "pictures.index"
_MAGIC = b"MTPICS\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQI")
NO_CAPTION, TEXT_CAPTION, JSON_CAPTION = range(3)
RECORD_DTYPE = np.dtype(
    [
        ("header", "<i8"), ("start", "<i8"), ("size", "<i8"), ("crc", "<u4"), ("caption", "<u4"),
        ("caption_header", "<i8"), ("caption_start", "<i8"), ("caption_size", "<i8"), ("caption_crc", "<u4"),
    ]
)  # fmt: skip
"""Bytes of the shard: where the tar header of the picture begins, where its content begins, how long it is; the same of
the caption. `caption`: NO_CAPTION, TEXT_CAPTION or JSON_CAPTION."""


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """A shard as it was when it was indexed. cut: where it was cut off; empty if it was whole."""

    name: str
    size: int
    sha256: str
    num_samples: int
    num_without_picture: int
    num_without_caption: int
    cut: str


class PictureIndex:
    """The index of `directory`, memory-mapped. The same shards give the same file, so its digest identifies the data.

    Raises: DataError when it is missing or damaged, with the command that makes it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = path = directory / INDEX_NAME
        self._again = f"make it again: `megatrain data pictures index {directory} --force`"
        if not path.exists():
            raise DataError(f"{path}: does not exist; make it: `megatrain data pictures index {directory}`")
        content = map_file(path)
        if len(content) < _HEADER.size:
            raise DataError(f"{path}: has {len(content)} bytes, less than its header; {self._again}")
        magic, version, description_bytes, num_samples, crc = _HEADER.unpack_from(content)
        if (magic, version) != (_MAGIC, _VERSION):
            raise DataError(
                f"{path}: has magic {magic!r} and version {version}; expected {_MAGIC!r} and {_VERSION}; {self._again}"
            )
        records_start = _HEADER.size + description_bytes
        description = bytes(content[_HEADER.size : records_start])
        if crc != _header_crc(len(description), num_samples, description):
            raise DataError(f"{path}: its header, at byte 0, differs from its checksum; it is damaged, {self._again}")
        num_bytes = num_samples * RECORD_DTYPE.itemsize
        size = records_start + num_bytes + num_blocks(num_bytes) * SUM_DTYPE.itemsize
        if len(content) != size:
            raise DataError(f"{path}: has {len(content)} bytes, and its header describes {size}; {self._again}")
        self.shards = tuple(IndexedShard(**shard) for shard in json.loads(description)["shards"])
        self.digest = hashlib.sha256(description).hexdigest()
        """Identifies the data: it covers the digests of all shards."""
        self.num_samples: int = num_samples
        self._bounds = np.cumsum([0, *(shard.num_samples for shard in self.shards)])
        self._records: NDArray[np.void] = np.frombuffer(content, RECORD_DTYPE, num_samples, records_start)
        self._sums = SummedContent(
            memoryview(content)[records_start : records_start + num_bytes],
            np.frombuffer(content, SUM_DTYPE, num_blocks(num_bytes), records_start + num_bytes),
        )

    def check_shards(self) -> None:
        """Raise DataError naming a shard that is absent, or that has another size than when it was indexed."""
        for shard in self.shards:
            path = self.directory / shard.name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DataError(
                    f"{path}: the shard cannot be read: {error.strerror}; copy it again, or {self._again}"
                ) from error
            if size != shard.size:
                raise DataError(
                    f"{path}: has {size} bytes, and {self.path} describes {shard.size}; copy it again, or {self._again}"
                )

    def record(self, number: int) -> tuple[IndexedShard, np.void]:
        """Return the shard and the record of a sample.

        Raises: DataError for a number that the index does not have, and when its part of the index is damaged.
        """
        if not 0 <= number < self.num_samples:
            raise DataError(f"{self.path}: has no sample {number}; it has samples 0 to {self.num_samples - 1}")
        places = np.array([number, number + 1], np.int64) * RECORD_DTYPE.itemsize
        if self._sums.first_damaged(places[:1], places[1:]) is not None:
            raise DataError(f"{self.path}: the record of sample {number} differs from its checksum; {self._again}")
        shard = int(np.searchsorted(self._bounds, number, side="right")) - 1
        return self.shards[shard], self._records[number]


def build_index(directory: Path, *, is_forced: bool = False, allows_cut: bool = False) -> PictureIndex:
    """Index the shards (*.tar) of a directory, in the natural order of their names. A file that appears is complete.

    allows_cut: index a shard that is cut off, too. A picture that is cut off is then a bad picture of the run.
    Raises: DataError when a shard cannot be used, naming it and the member at fault; when there is an index already,
    unless `is_forced`; when no shard has a picture; or when the index cannot be written.
    """
    path = directory / INDEX_NAME
    if path.exists() and not is_forced:
        raise DataError(f"{path}: exists already; replace it with --force")
    try:
        paths = sorted(directory.glob("*.tar"), key=lambda shard: natural_order(shard.name))
    except OSError as error:
        raise DataError(f"{directory}: cannot be read: {error.strerror}") from error
    shards: list[ScannedShard] = []
    for shard_path in paths:
        shard = scan_shard(shard_path)
        if shard.cut and not allows_cut:
            raise DataError(f"{shard_path}: {shard.cut}; copy it again, or index what is there with --allow-cut")
        shards.append(shard)
    if not any(shard.samples for shard in shards):
        raise DataError(f"{directory}: has no shard (*.tar) with a picture (.jpg, .jpeg, .png, .webp)")
    try:
        _write(path, shards)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
    return PictureIndex(directory)


def _write(path: Path, shards: Sequence[ScannedShard]) -> None:
    description = json.dumps({"shards": [asdict(_indexed(shard)) for shard in shards]}).encode()
    records = np.array([_record(sample) for shard in shards for sample in shard.samples], RECORD_DTYPE)
    header = (len(description), len(records), _header_crc(len(description), len(records), description))
    temporary = path.with_name(temporary_name(path.name))
    try:
        with temporary.open("xb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, *header) + description)
            summed = SummingWriter(file)
            summed.write(records.tobytes())
            file.write(summed.sums().tobytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _indexed(shard: ScannedShard) -> IndexedShard:
    num_without_caption = sum(sample.caption is None for sample in shard.samples)
    return IndexedShard(
        shard.name, shard.size, shard.sha256, len(shard.samples), len(shard.without_picture), num_without_caption,
        shard.cut,
    )  # fmt: skip


def _record(sample: ShardSample) -> tuple[Any, ...]:
    picture, caption = sample.picture, sample.caption
    assert picture is not None
    of_picture = (picture.header, picture.start, picture.size, picture.crc)
    if caption is None:
        return (*of_picture, NO_CAPTION, 0, 0, 0, 0)
    kind = JSON_CAPTION if split_name(caption.name)[1] == JSON_KIND else TEXT_CAPTION
    return (*of_picture, kind, caption.header, caption.start, caption.size, caption.crc)


def _header_crc(description_bytes: int, num_samples: int, description: bytes) -> int:
    return zlib.crc32(description, zlib.crc32(_HEADER.pack(_MAGIC, _VERSION, description_bytes, num_samples, 0)))
