"""A location for checkpoints behind a URL: s3://bucket/run, gs://..., hdfs://..., through fsspec and its drivers.

An object store writes a whole file or nothing. Other stores may stop half way, so there a small file is written under a
temporary name and then moved. Drivers may cache listings, so the cache is cleared before each one. file:// goes through
fsspec too, so that tests can exercise all of this on a disk. fsspec is imported when the first URL is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location, Sink, is_relative_name
from megatrain.contracts.errors import CheckpointError, MissingFileError
from megatrain.contracts.files.file_locks import give_name
from megatrain.contracts.files.url_drivers import driver, reason, split_url
from megatrain.contracts.files.whole_files import MISSING_ERRORS, is_temporary_name, sync_directory, temporary_name

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "tos", "memory"})
"""Schemes whose put is atomic and that need no directories."""
_CONDITIONAL_PUTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
"""Schemes whose drivers can put a file only if it does not exist, so that exactly one of two writers wins."""
_BLOCK_BYTES = 16 * 2**20
"""Size of the parts in which a large file is sent. S3 accepts 10,000 parts, so a file may have 167 GB."""
_MAX_UNCHECKED_BYTES = 64 * 2**20
"""Largest range to read without a check of the file's size: the size of the largest item."""


def open_location(text: str) -> Location:
    """Return the location that a path or a URL (scheme://...) names, whether or not it exists.

    Raises: CheckpointError when the URL is invalid, contains a password, or has no installed driver.
    """
    found = split_url(text, CheckpointError)
    if found is None:
        if not text or "://" in text:
            raise CheckpointError(f"{text!r} is neither a path nor a URL such as s3://bucket/run")
        return LocalLocation(Path(text))
    store = driver(text, CheckpointError)
    return UrlLocation("://".join(found), store._strip_protocol(text), store)


@dataclass(frozen=True, slots=True)
class UrlLocation:
    """A file or directory behind a URL. `path` is its name in the driver, `store`."""

    url: str
    path: str
    store: Any

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> UrlLocation:
        if not is_relative_name(name):
            raise CheckpointError(f"{self}: {name!r} is not a relative path without '..' below it")
        return UrlLocation(f"{self.url}/{name}", f"{self.path.rstrip('/')}/{name}", self.store)

    def entries(self) -> list[Location]:
        with self._naming("cannot be listed"):
            self.store.invalidate_cache()
            try:
                paths = [str(path).rstrip("/") for path in self.store.ls(self.path, detail=False)]
            except FileNotFoundError:
                return []
            if paths == [self.path] and self._has_type("file"):
                raise NotADirectoryError
        # a store may list a directory as an entry of itself; temporary files of failed writes do not count
        names = {path.rpartition("/")[2] for path in paths if path != self.path}
        return [self / name for name in sorted(names) if not is_temporary_name(name)]

    def exists(self) -> bool:
        return self._info() is not None

    def size(self) -> int | None:
        info = self._info()
        return int(info["size"]) if info is not None and info["type"] == "file" else None

    def read(self) -> bytes:
        with self._naming("cannot be read", MissingFileError):
            return self._content(None, None)

    def read_range(self, offset: int, num_bytes: int) -> bytearray:
        with self._naming("cannot be read", MissingFileError):
            content = b""
            if 0 < num_bytes <= _MAX_UNCHECKED_BYTES:
                # drivers report a range beyond the end with various errors; any other error is raised again below
                with suppress(Exception):
                    content = self._content(offset, offset + num_bytes)
                if len(content) == num_bytes:
                    return bytearray(content)
            # an invented length must not become the size of a buffer
            size = self.size()
            if size is None:
                raise IsADirectoryError if self.exists() else FileNotFoundError
            if offset + num_bytes <= size:
                content = self._content(offset, offset + num_bytes) if num_bytes else b""
                if len(content) == num_bytes:
                    return bytearray(content)
        raise CheckpointError(
            f"{self}: {size} bytes, but bytes {offset} to {offset + num_bytes} were requested; the file is cut short"
        )

    def write(self, content: bytes) -> None:
        with self._naming("cannot be written"):
            if self._schemes & _OBJECT_STORES:
                self.store.pipe_file(self.path, content)
                return
            with self._written(content) as temporary:
                self.store.mv(temporary, self.path)

    def write_new(self, content: bytes) -> bool:
        with self._naming("cannot be written"):
            try:
                if self._schemes & _CONDITIONAL_PUTS:
                    self.store.pipe_file(self.path, content, mode="create")
                elif "file" in self._schemes:
                    with self._written(content) as temporary:
                        is_new = give_name(Path(temporary), Path(self.path))
                        Path(temporary).unlink(missing_ok=True)
                    return is_new
                else:
                    # without a conditional put, only a check beforehand is possible
                    if self._info() is not None:
                        return False
                    self.write(content)
            except FileExistsError:
                return False
        return True

    def is_exclusive(self) -> bool:
        if "file" in self._schemes:
            return LocalLocation(Path(self.path)).is_exclusive()
        if not self._schemes & _CONDITIONAL_PUTS:
            return False
        # a server may ignore the condition and write anyway
        trial = self / temporary_name("exclusive")
        try:
            return trial.write_new(b"1") and not trial.write_new(b"2")
        except CheckpointError:
            return False
        finally:
            with suppress(CheckpointError):
                trial.remove()

    @contextmanager
    def _written(self, content: bytes) -> Iterator[str]:
        """Yield the name of a temporary file for the block to move into place. The move is durable after the block."""
        self._make_parent()
        temporary = f"{self._parent}/{temporary_name(self.name)}"
        try:
            with self.store.open(temporary, "wb") as file:
                file.write(content)
                self._sync(file)
            yield temporary
            self._sync_parent()
        except BaseException:
            with suppress(Exception):
                self.store.rm_file(temporary)
            raise

    def create(self) -> Sink:
        with self._naming("cannot be written"):
            if not self._schemes & _OBJECT_STORES:
                self._make_parent()
                # a superseded process that has the old file open must keep writing to that file, not to the new one
                with suppress(FileNotFoundError):
                    self.store.rm_file(self.path)
            return _UrlSink(self, self.store.open(self.path, "wb", block_size=_BLOCK_BYTES))

    def remove(self) -> None:
        with self._naming("cannot be removed"):
            self.store.invalidate_cache()
            with suppress(*MISSING_ERRORS):
                try:
                    self.store.rm(self.path, recursive=True)
                except FileNotFoundError:
                    # another process may be removing the same tree: remove the rest
                    if self._has_type("directory"):
                        self.store.rm(self.path, recursive=True)
                self._sync_parent()

    @property
    def _parent(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def _schemes(self) -> frozenset[str]:
        protocol = self.store.protocol
        return frozenset((protocol,) if isinstance(protocol, str) else protocol)

    def _info(self) -> dict[str, Any] | None:
        with self._naming("cannot be looked up"):
            self.store.invalidate_cache()
            try:
                return dict(self.store.info(self.path))
            except MISSING_ERRORS:
                return None

    def _has_type(self, kind: str) -> bool:
        info = self._info()
        return info is not None and info["type"] == kind

    def _content(self, start: int | None, end: int | None) -> bytes:
        try:
            return bytes(self.store.cat_file(self.path, start=start, end=end))
        except FileNotFoundError as error:
            if self._has_type("directory"):
                raise IsADirectoryError from error
            raise

    def _make_parent(self) -> None:
        """Create the directory above. Raises: IsADirectoryError when a directory has the name of the file to write."""
        if self._parent:
            self.store.makedirs(self._parent, exist_ok=True)
        if self._has_type("directory"):
            raise IsADirectoryError

    def _sync(self, file: Any) -> None:
        """Make a local file durable; other stores do that themselves."""
        if "file" in self._schemes:
            file.flush()
            os.fsync(file.fileno())

    def _sync_parent(self) -> None:
        if "file" in self._schemes:
            sync_directory(Path(self._parent or "/"))

    @contextmanager
    def _naming(self, failure: str, missing: type[CheckpointError] = CheckpointError) -> Iterator[None]:
        """Turn any exception of a driver into an error that names the URL and the failed action."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            kind = missing if isinstance(error, MISSING_ERRORS) else CheckpointError
            raise kind(f"{self}: {failure}: {reason(error)}") from error


class _UrlSink:
    """Writes under the final name: no COMMIT covers a partly written file."""

    def __init__(self, location: UrlLocation, file: Any) -> None:
        self._location = location
        self._file = file
        self._is_open = True

    def write(self, buffer: bytes | bytearray | memoryview) -> None:
        self._check_open()
        with self._location._naming("cannot be written"), memoryview(buffer) as view, view.cast("B") as content:
            self._file.write(content)

    def close(self) -> None:
        self._check_open()
        self._is_open = False
        try:
            with self._location._naming("cannot be written"):
                self._location._sync(self._file)
                self._file.close()
                self._location._sync_parent()
        except CheckpointError:
            self._discard()
            raise

    def abort(self) -> None:
        if self._is_open:
            self._is_open = False
            self._discard()

    def _discard(self) -> None:
        # separate steps: a driver that fails at one may succeed at another
        with suppress(Exception):
            self._file.discard()
        with suppress(Exception):
            if hasattr(self._file, "_closed"):
                # closing it, even by garbage collection, would send the rest and create the file
                self._file.closed = True
            else:
                self._file.close()
        with suppress(Exception):
            self._location.remove()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"{self._location} is closed")
