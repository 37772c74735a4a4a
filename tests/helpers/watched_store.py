"""fsspec's memory store with a record of its reads, and with faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

Fault = Callable[[str], Exception | None]
"""Returns the error of a read of the file with this name."""


class WatchedStore:
    """A folder in the store of this process. `ranges`: the name, start and end of each read of a range, including
    failed reads."""

    def __init__(self) -> None:
        self.root = f"memory://{uuid4().hex}"
        self.ranges: list[tuple[str, int, int]] = []
        self.fault: Fault = lambda name: None

    def upload(self, folder: Path) -> None:
        """Store the files of a folder."""
        for path in folder.iterdir():
            if path.is_file():
                self.put(path.name, path.read_bytes())

    def put(self, name: str, content: bytes) -> None:
        fsspec.filesystem("memory").pipe_file(f"{self.root}/{name}", content)

    def remove(self, name: str) -> None:
        fsspec.filesystem("memory").rm_file(f"{self.root}/{name}")

    def blocks(self, name: str) -> list[int]:
        """Return the starts of the ranges of a file that were read, sorted."""
        return sorted(start for read, start, _ in self.ranges if read == name)


@contextmanager
def watched_store(patch: pytest.MonkeyPatch) -> Iterator[WatchedStore]:
    """Yield an empty store."""
    store, cat_file = WatchedStore(), MemoryFileSystem.cat_file

    def watched(self: MemoryFileSystem, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
        name = path.rpartition("/")[2]
        store.ranges.append((name, start, end))
        error = store.fault(name)
        if error is not None:
            raise error
        return cat_file(self, path, start, end, **more)

    patch.setattr(MemoryFileSystem, "cat_file", watched)
    yield store
    fsspec.filesystem("memory").rm(store.root, recursive=True)
