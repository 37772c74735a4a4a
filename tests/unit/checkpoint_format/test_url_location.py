"""Locations behind URLs: the same contract as on a local disk, with drivers that fail, cache and buffer."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.url_location import UrlLocation, open_location
from megatrain.contracts.errors import CheckpointError, MissingFileError
from tests.helpers.checkpoint_tree import tree
from tests.helpers.location_cases import DiskCases, LocationCases, contents, failing


@pytest.fixture
def memory() -> Iterator[str]:
    """A URL in memory with nothing below it, before and after the test."""
    store = fsspec.filesystem("memory")
    yield "memory://test-url-location"
    if store.exists("/test-url-location"):
        store.rm("/test-url-location", recursive=True)


class TestFileUrl(DiskCases):
    """A disk behind fsspec."""

    MOVE = (LocalFileSystem, "mv")

    @pytest.fixture
    def place(self, tmp_path: Path) -> Location:
        return open_location(f"file://{tmp_path}/place")


class TestMemoryUrl(LocationCases):
    """The closest equivalent of an object store that needs no server."""

    @pytest.fixture
    def place(self, memory: str) -> Location:
        return open_location(f"{memory}/place")


# The location of a path or URL


def test_a_path_is_a_path_and_a_url_goes_through_fsspec(tmp_path: Path) -> None:
    for text in (str(tmp_path), "runs/demo", "a:b"):
        assert open_location(text) == LocalLocation(Path(text))
    place = open_location(f"file://{tmp_path}/run/")
    assert isinstance(place, UrlLocation)
    assert (str(place), place.name) == (f"file://{tmp_path}/run", "run")
    (place / "a/b").write(b"1")
    assert tree(tmp_path) == {"run/a/b": b"1"}
    assert open_location(str(place / "a")).entries() == [place / "a/b"]


def test_the_root_of_a_store(memory: str) -> None:
    (open_location("memory://") / memory.rpartition("/")[2] / "a").write(b"1")
    assert contents(open_location(memory)) == {"a": b"1"}
    assert (open_location("file:///") / "proc/self/comm").exists()


def test_text_that_is_neither_path_nor_url_is_refused() -> None:
    for text in ("", "S3://bucket", "://x", "simplecache::s3://bucket", "s 3://bucket"):
        with pytest.raises(CheckpointError, match=f"{text!r} is neither a path nor a URL such as s3://bucket/run"):
            open_location(text)
    with pytest.raises(CheckpointError, match="foo://x: cannot be opened: ValueError: Protocol not known: foo"):
        open_location("foo://x")


@pytest.mark.parametrize(
    ("url", "module", "package"), [("gs://b/x", "gcsfs", "gcsfs"), ("sftp://h/x", "paramiko", "paramiko")]
)
def test_a_driver_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, package: str
) -> None:
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    scheme = url.partition(":")[0]
    with pytest.raises(
        CheckpointError, match=rf"{url}: no driver for {scheme}:// is installed .*; pip install {package}$"
    ):
        open_location(url)


def test_without_fsspec_a_url_is_refused_and_a_path_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert isinstance(open_location("/runs/demo"), LocalLocation)
    with pytest.raises(CheckpointError, match=r"s3://bucket/run: URLs need fsspec .*; pip install fsspec"):
        open_location("s3://bucket/run")


def test_a_password_is_neither_taken_nor_shown() -> None:
    with pytest.raises(CheckpointError, match=r"sftp://\.\.\.@host/run: a password in a URL would appear") as caught:
        open_location("sftp://me:secret@host/run")
    assert "secret" not in str(caught.value)


# A disk behind fsspec: writes are complete or have no effect, and are durable


@pytest.fixture
def on_disk(tmp_path: Path) -> Location:
    return open_location(f"file://{tmp_path}/place")


def test_mount_without_hard_links_is_written_and_not_exclusive(
    on_disk: Location, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert on_disk.is_exclusive()
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    assert not on_disk.is_exclusive()
    for content, is_new in ((b"first", True), (b"second", False)):
        assert (on_disk / "COMMIT").write_new(content) is is_new
    assert tree(tmp_path) == {"place/COMMIT": b"first"}
    monkeypatch.setattr(os, "link", failing(errno.ENOSPC))
    with pytest.raises(CheckpointError, match=r"place/more: cannot be written: No space left on device$"):
        (on_disk / "more").write_new(b"")
    assert tree(tmp_path) == {"place/COMMIT": b"first"}


def test_invented_length_is_not_read(on_disk: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    (on_disk / "a").write(b"12")
    monkeypatch.setattr(LocalFileSystem, "cat_file", failing(errno.ENOMEM))
    with pytest.raises(CheckpointError, match="place/a: 2 bytes, but bytes 0 to 1099511627776 were requested"):
        (on_disk / "a").read_range(0, 2**40)


def test_tree_removed_by_another_process_is_removed(on_disk: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tree/a/b", "tree/a/c", "tree/d"):
        (on_disk / name).write(b"")
    real = LocalFileSystem.rm
    lost = ["tree/d"]

    def rm(self: LocalFileSystem, path: str, recursive: bool = False) -> None:
        if lost:
            Path(path, "d").unlink()
            lost.clear()
            raise FileNotFoundError(path)
        real(self, path, recursive=recursive)

    monkeypatch.setattr(LocalFileSystem, "rm", rm)
    (on_disk / "tree").remove()
    assert on_disk.entries() == []


# Drivers that buffer, cache their listings, and raise their own errors


class DriverError(Exception):
    """An error of a driver, which is not an OSError."""


class _Upload(AbstractBufferedFile):
    """A file that appears when its last part was sent, as in S3."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if self.fs.is_down:
            raise DriverError("the store is away")
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.files[self.path] = b"".join(self.parts)
        return True

    def discard(self) -> None:
        self.fs.num_discarded += 1


class StorageDriver(AbstractFileSystem):
    """A store that lists from its cache until the cache is cleared."""

    protocol = "s3"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.listed: dict[str, list[dict[str, Any]]] = {}
        self.is_down = False
        self.num_discarded = 0

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed.clear()

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:
        if self.is_down:
            raise DriverError("the store is away\nand much more")
        if path not in self.listed:
            found = {name for name in self.files if name.startswith(path + "/") or name == path}
            if not found:
                raise FileNotFoundError(path)
            self.listed[path] = [{"name": name, "size": len(self.files[name]), "type": "file"} for name in found]
        return self.listed[path] if detail else [entry["name"] for entry in self.listed[path]]

    def _open(self, path: str, mode: str = "rb", block_size: int = 0, **_: object) -> _Upload:
        return _Upload(self, path, mode, block_size=4)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        if self.is_down or (start is not None and start >= len(self.files.get(path, b""))):
            raise DriverError("416")
        return self.files[path][start:end]


@pytest.fixture
def driver() -> StorageDriver:
    return StorageDriver()


@pytest.fixture
def bucket(driver: StorageDriver) -> Location:
    return UrlLocation("s3://bucket/run", "bucket/run", driver)


def test_a_file_that_is_given_up_never_appears(bucket: Location, driver: StorageDriver) -> None:
    sink = (bucket / "a").create()
    sink.write(b"0123456789")
    sink.abort()
    del sink
    gc.collect()
    assert (driver.files, driver.num_discarded) == ({}, 1)
    sink = (bucket / "a").create()
    sink.write(b"01")
    sink.write(b"23456789")
    sink.close()
    assert driver.files == {"bucket/run/a": b"0123456789"}


def test_a_file_whose_last_part_fails_never_appears(bucket: Location, driver: StorageDriver) -> None:
    sink = (bucket / "a").create()
    sink.write(b"0123456789")
    driver.is_down = True
    with pytest.raises(CheckpointError, match="s3://bucket/run/a: cannot be written: DriverError: the store is away"):
        sink.close()
    driver.is_down = False
    del sink
    gc.collect()
    assert (driver.files, driver.num_discarded) == ({}, 1)


def test_writes_of_others_are_seen_at_once(bucket: Location, driver: StorageDriver) -> None:
    driver.files["bucket/run/a"] = b"1"
    assert [entry.name for entry in bucket.entries()] == ["a"]
    driver.files["bucket/run/b"] = b"12"
    assert [entry.name for entry in bucket.entries()] == ["a", "b"]
    assert (bucket / "b").size() == 2


def test_errors_of_any_driver_name_the_url(bucket: Location, driver: StorageDriver) -> None:
    driver.files["bucket/run/a"] = b"1"
    place = bucket / "a"
    assert place.read_range(0, 1) == b"1"
    with pytest.raises(CheckpointError, match="1 bytes, but bytes 1 to 2 were requested"):
        place.read_range(1, 1)
    driver.is_down = True
    for action in (place.read, place.entries, place.exists, place.size, lambda: place.read_range(0, 1)):
        with pytest.raises(
            CheckpointError, match=r"^s3://bucket/run/a: cannot be [a-z ]*: DriverError: [^\n]*$"
        ) as caught:
            action()
        assert not isinstance(caught.value, MissingFileError)
