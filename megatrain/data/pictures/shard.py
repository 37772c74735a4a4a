"""A shard: a tar file of the WebDataset layout. Members with the same key are one sample.

The key of a member is its path up to the first dot of its name, its kind the rest: `a/0001.jpg` and `a/0001.txt` are
one sample, and `a/0001.mask.png` is no picture of it.
Source: the WebDataset format (github.com/webdataset/webdataset, README).
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from megatrain.contracts.errors import DataError

PICTURE_KINDS = ("jpg", "jpeg", "png", "webp")
TEXT_KIND, JSON_KIND = "txt", "json"
_READ_BYTES = 1 << 20
_TAR_BLOCK = 512


@dataclass(frozen=True, slots=True)
class ShardMember:
    """A member of a shard. header: where its tar header begins, start: where its content begins. crc: of the content;
    of a member that is cut off, 0."""

    name: str
    header: int
    start: int
    size: int
    crc: int


@dataclass(slots=True)
class ShardSample:
    """The members with one key. A caption in a .txt file comes before one in a .json file."""

    key: str
    picture: ShardMember | None = None
    text: ShardMember | None = None
    json: ShardMember | None = None

    @property
    def caption(self) -> ShardMember | None:
        return self.text or self.json


@dataclass(slots=True)
class ScannedShard:
    """What is in a shard. cut: where it is cut off, as the end of a sentence; empty if it is whole. without_picture:
    keys of samples that have a caption and no picture."""

    name: str
    size: int
    sha256: str
    samples: list[ShardSample]
    cut: str = ""
    without_picture: list[str] = field(default_factory=list)


def split_name(name: str) -> tuple[str, str]:
    """Return the key of a member, and its kind in lower case; an empty kind for a name without a dot."""
    directory, slash, base = name.rpartition("/")
    stem, _, kind = base.partition(".")
    return f"{directory}{slash}{stem}", kind.lower()


def scan_shard(path: Path) -> ScannedShard:
    """Read a shard once for its members, and once for its digest.

    Raises: DataError when the file cannot be read, is not a tar file, or has two members of one kind with the same key.
    """
    samples: dict[str, ShardSample] = {}
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            members, cut = _members(path, file, size)
            for member in members:
                _add(path, samples, member)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; copy it again") from error
    found = [sample for sample in samples.values() if sample.picture is not None]
    lost = [sample.key for sample in samples.values() if sample.picture is None and sample.caption is not None]
    return ScannedShard(path.name, size, digest, found, cut, lost)


def member_name(file: BinaryIO, header: int) -> str:
    """Return the name of the member whose tar header begins at byte `header`; its place if it cannot be read."""
    try:
        file.seek(header)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            member = tar.next()
    except (OSError, tarfile.TarError):
        member = None
    return f"the member at byte {header}" if member is None else member.name


def _members(path: Path, file: BinaryIO, size: int) -> tuple[list[ShardMember], str]:
    """Return the members that are files, and where the shard is cut off."""
    found: list[ShardMember] = []
    last = ""
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in _until_cut(tar):
                last = member.name
                if member.isreg() and not member.issparse():
                    found.append(ShardMember(member.name, member.offset, member.offset_data, member.size, 0))
            end = tar.offset
    except tarfile.ReadError as error:
        raise DataError(
            f"{path}: is not a tar file without compression ({error}); a WebDataset shard is such a file"
        ) from error
    return [_with_crc(file, member, size) for member in found], _cut_text(file, size, last, end)


def _until_cut(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members up to the end, or up to one that is cut off."""
    while True:
        try:
            member = tar.next()
        except tarfile.ReadError:
            return
        if member is None:
            return
        yield member


def _with_crc(file: BinaryIO, member: ShardMember, size: int) -> ShardMember:
    if member.start + member.size > size:
        return member
    file.seek(member.start)
    crc, left = 0, member.size
    while left and (content := file.read(min(left, _READ_BYTES))):
        crc, left = zlib.crc32(content, crc), left - len(content)
    return replace(member, crc=crc)


def _cut_text(file: BinaryIO, size: int, last: str, end: int) -> str:
    """Return where a shard is cut off; empty if it is not. tarfile takes a member that is cut off for the last one.

    last, end: the name of the last member that was found, and where it ends; in a whole shard, a block of zeros
    follows.
    """
    if end > size:
        return f"is cut off at byte {size}, in {last}"
    file.seek(end)
    if file.read(_TAR_BLOCK) == bytes(_TAR_BLOCK):
        return ""
    return f"is cut off or damaged at byte {end}, after {last}: neither a member nor the mark of the end follows"


def _add(path: Path, samples: dict[str, ShardSample], member: ShardMember) -> None:
    key, kind = split_name(member.name)
    field_name = {TEXT_KIND: "text", JSON_KIND: "json"}.get(kind, "picture" if kind in PICTURE_KINDS else "")
    if not field_name:
        return
    sample = samples.setdefault(key, ShardSample(key))
    other: ShardMember | None = getattr(sample, field_name)
    if other is not None:
        raise DataError(
            f"{path}: {member.name} and {other.name} are both the {field_name} of the sample {key}; give each sample a "
            "key of its own"
        )
    setattr(sample, field_name, member)
