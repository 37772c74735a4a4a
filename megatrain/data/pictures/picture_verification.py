"""Read the shards of an index completely, and report every difference and every sample that cannot be used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrain.data.pictures.bad_picture import BadPictureError
from megatrain.data.pictures.picture_index import IndexedShard, PictureIndex
from megatrain.data.pictures.shard_reader import ShardReader
from megatrain.formatting import count_text


@dataclass(frozen=True, slots=True)
class PictureProblem:
    """What is wrong with a shard. member: empty if it concerns the whole shard."""

    shard: str
    member: str
    text: str

    def __str__(self) -> str:
        place = f"{self.shard}: {self.member}" if self.member else self.shard
        return f"{place}: {self.text}"


def verify_pictures(directory: Path, max_pixels: int) -> Iterator[PictureProblem]:
    """Yield all problems: of shards, then of samples. Pictures are read, but not decoded.

    Raises: DataError when the index is missing or damaged.
    """
    index = PictureIndex(directory)
    for shard in index.shards:
        yield from _shard_problems(directory / shard.name, shard)
    reader = ShardReader(index)
    try:
        for number in range(index.num_samples):
            try:
                reader.read(number, max_pixels)
            except BadPictureError as error:
                yield PictureProblem(error.picture.shard, error.picture.member, error.picture.reason)
    finally:
        reader.close()


def _shard_problems(path: Path, shard: IndexedShard) -> Iterator[PictureProblem]:
    if shard.cut:
        yield PictureProblem(str(path), "", f"{shard.cut}; copy it again, and index it again")
    if shard.num_without_picture:
        captions = count_text(shard.num_without_picture, "caption")
        text = f"has {captions} without a picture (.jpg, .jpeg, .png, .webp)"
        yield PictureProblem(str(path), "", text)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        yield PictureProblem(str(path), "", f"cannot be read: {error.strerror}; copy it again")
        return
    if (size, digest) != (shard.size, shard.sha256):
        text = (
            f"has {size} bytes with SHA-256 {digest[:12]}..., and the index has {shard.size} with "
            f"{shard.sha256[:12]}...; copy it again, or index it again"
        )
        yield PictureProblem(str(path), "", text)
