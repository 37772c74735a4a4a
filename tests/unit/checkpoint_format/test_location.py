"""A location on a local disk: written files are complete and durable, and errors are named."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
from pathlib import Path

import pytest

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location, is_relative_name
from megatrain.contracts.errors import CheckpointError
from tests.helpers.checkpoint_tree import tree
from tests.helpers.location_cases import NAMES, OTHER_NAMES, DiskCases, failing


@pytest.fixture
def place(tmp_path: Path) -> Location:
    return LocalLocation(tmp_path / "place")


class TestLocalLocation(DiskCases):
    """The contract of all locations on a disk."""

    MOVE = (os, "replace")

    def test_directories_reach_the_disk_before_their_files(self, place: Location, calls: list[str]) -> None:
        (place / "b" / "COMMIT").write(b"x")
        assert calls[1:] == ["fsync place", "fsync .COMMIT.*.tmp", "rename COMMIT", "fsync b"]


def test_relative_names() -> None:
    assert all(is_relative_name(name) for name in NAMES)
    assert not any(is_relative_name(name) for name in OTHER_NAMES)


def test_a_range_arrives_in_parts(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "a").write(b"0123456789")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: real(file, [views[0][:3]], offset))
    assert (place / "a").read_range(1, 8) == b"12345678"
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(CheckpointError, match="was cut short while bytes 1 to 9 were read"):
        (place / "a").read_range(1, 8)


def test_file_in_place_of_a_directory_is_named(place: Location) -> None:
    (place / "file").write(b"")
    with pytest.raises(CheckpointError, match=r"place/file/x/y: cannot be written: File exists \(.*/place/file\)"):
        (place / "file/x/y").write(b"")


def test_a_directory_that_cannot_be_synced(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "a").write(b"old")
    real = os.fsync

    def fsync(file: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{file}")).is_dir():
            raise OSError(number, os.strerror(number))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    number = errno.EINVAL
    (place / "a").write(b"new")
    assert (place / "a").read() == b"new"
    number = errno.EIO
    with pytest.raises(CheckpointError, match="place/a: cannot be written: Input/output error"):
        (place / "a").write(b"newer")


def test_bytes_that_are_not_whole_pages_are_written_too(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages may bypass the page cache; bytes of odd length or offset may not, and are written nevertheless."""
    pages = mmap.mmap(-1, 1 << 20)
    pages[:] = random.Random(1).randbytes(len(pages))
    parts = [pages[:], pages[:1000], pages[7:5000], pages[:], b"end"]
    refused: list[int] = []
    real = os.write

    def write(file: int, content: memoryview) -> int:
        is_direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and len(content) % mmap.PAGESIZE:  # like a disk whose blocks are pages
            refused.append(len(content))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, content)

    monkeypatch.setattr(os, "write", write)
    sink = (place / "a").create()
    sink.write(pages)
    for part in parts[1:]:
        sink.write(part)
    sink.close()
    assert (place / "a").read() == b"".join(parts)
    assert len(refused) <= 1  # and not called again


def test_a_file_system_without_direct_writes(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "fcntl", failing(errno.EINVAL))
    sink = (place / "a").create()
    sink.write(mmap.mmap(-1, mmap.PAGESIZE))
    sink.write(b"12")
    sink.close()
    assert (place / "a").read() == bytes(mmap.PAGESIZE) + b"12"


def test_a_disk_that_takes_little_at_a_time(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, content: real(file, content[:3]))
    sink = (place / "a").create()
    sink.write(b"0123456789")
    sink.write(b"ab")
    sink.close()
    assert (place / "a").read() == b"0123456789ab"


def test_a_full_disk_is_named_and_the_file_is_given_up(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = (place / "a").create()
    buffer = bytearray(b"12")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(errno.ENOSPC))
        with pytest.raises(CheckpointError, match="place/a: cannot be written: No space left on device"):
            sink.write(buffer)
    buffer.clear()  # No view of it is left, although the error still exists.
    sink.abort()
    sink.abort()
    assert place.entries() == []


def test_removal_follows_no_links(place: Location, tmp_path: Path) -> None:
    (place / "tree/c").write(b"2")
    (place / "kept/d").write(b"3")
    (tmp_path / "place" / "tree" / "link").symlink_to(tmp_path / "place" / "kept")
    (tmp_path / "place" / "link").symlink_to(tmp_path / "place" / "kept")
    for name in ("tree", "link"):
        (place / name).remove()
    assert tree(tmp_path) == {"place/kept/d": b"3"}
    assert [entry.name for entry in place.entries()] == ["kept"]


def test_removal_beside_another_one(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that another process has removed meanwhile counts as removed."""
    for name in ("tree/a/b", "tree/a/c", "tree/d"):
        (place / name).write(b"")
    real = os.unlink

    def unlink(path: Path, **options: int) -> None:
        real(path, **options)
        monkeypatch.setattr(os, "unlink", real)
        (place / "tree").remove()

    monkeypatch.setattr(os, "unlink", unlink)
    (place / "tree").remove()
    assert place.entries() == []


def test_removal_that_fails_names_the_file(place: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "tree/a").write(b"")

    def unlink(path: Path, **_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "unlink", unlink)
    message = r"place/tree: cannot be removed: Operation not permitted \(.*/place/tree/a\)"
    with pytest.raises(CheckpointError, match=message):
        (place / "tree").remove()


def test_fifo_is_no_file_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "COMMIT")
    for read in (LocalLocation.read, lambda location: location.read_range(0, 1)):
        with pytest.raises(CheckpointError, match=r"COMMIT: cannot be read: Not a regular file"):
            read(LocalLocation(tmp_path / "COMMIT"))


def test_a_file_of_absurd_size_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    with (tmp_path / "RESUME").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=r"RESUME: 1099511627776 bytes, and at most 1073741824 are read"):
        LocalLocation(tmp_path / "RESUME").read()
