"""A disk that loses power: data that was not synced is kept, lost, or partly written.

While `watched`, every fsync and every sync of a directory is recorded, and the power may fail before each of them. The
remaining content is drawn at random: for each change to a directory since its last sync, whether it happened; for each
file that changed since its last sync, its durable content, the whole new content, or a part.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain.checkpoint_format import local_location

Tree = dict[str, bytes | None]
"""Path below the root -> content, None for a directory; each directory before its entries."""


def put_tree(tree: Tree, target: Path) -> None:
    """Create a directory with this content."""
    for name, content in tree.items():
        path = target / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)


class Disk:
    """Follows a directory tree. Its initial content is durable."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._content: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._is_directory: dict[int, bool] = {}
        for path in [root, *root.rglob("*")]:
            self._sync(path)

    def _sync(self, path: Path) -> None:
        number = path.stat().st_ino
        self._is_directory[number] = path.is_dir()
        if path.is_dir():
            self._entries[number] = _entries(path)
        else:
            self._content[number] = path.read_bytes()

    def synced(self, file: int) -> None:
        """Record that an open file or directory is durable now."""
        self._sync(Path(os.readlink(f"/proc/self/fd/{file}")))

    def after_a_power_cut(self, draw: random.Random) -> Tree:
        """Return a possible content of the disk if the power fails now."""
        now = {path.stat().st_ino: path for path in [self._root, *self._root.rglob("*")]}
        return dict(self._left(self._root.stat().st_ino, now, draw, ""))

    def _left(
        self, number: int, now: dict[int, Path], draw: random.Random, name: str
    ) -> Iterator[tuple[str, bytes | None]]:
        path = now.get(number)
        is_directory = path.is_dir() if path is not None else self._is_directory.get(number, False)
        if not is_directory:
            yield name, self._content_left(number, path, draw)
            return
        yield name, None
        durable = self._entries.get(number, {})
        current = _entries(path) if path is not None else {}
        for entry in sorted(durable.keys() | current.keys()):
            child = draw.choice([entries.get(entry) for entries in (durable, current)])
            if child is not None:
                yield from self._left(child, now, draw, f"{name}/{entry}" if name else entry)

    def _content_left(self, number: int, path: Path | None, draw: random.Random) -> bytes:
        durable = self._content.get(number, b"")
        current = path.read_bytes() if path is not None else durable
        if durable == current:
            return durable
        return draw.choice([durable, current, current[: draw.randrange(len(current) + 1)]])


def _entries(path: Path) -> dict[str, int]:
    return {child.name: child.lstat().st_ino for child in path.iterdir()}


@contextmanager
def watched(root: Path, at_a_sync: Callable[[Disk], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Call `at_a_sync` before each sync below `root` in the block, one at a time."""
    disk, lock, fsync = Disk(root), threading.RLock(), os.fsync

    def note(file: int) -> None:
        with lock:
            is_below = os.readlink(f"/proc/self/fd/{file}").startswith(str(root))
            if is_below:
                at_a_sync(disk)
            fsync(file)
            if is_below:
                disk.synced(file)

    with monkeypatch.context() as patched:
        patched.setattr(local_location.os, "fsync", note)
        yield disk
