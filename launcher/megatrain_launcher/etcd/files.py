"""The files in the directory of a job's etcd: the lock, etcd's data, and small files such as the password.

Files that are removed while etcd runs are found and restored (ADR 0043).
"""

from __future__ import annotations

import io
from pathlib import Path

from megatrain.contracts.closable import Closable
from megatrain.contracts.files.vanished_files import is_in_place
from megatrain.contracts.files.whole_files import write_private
from megatrain_launcher.etcd.data import HeldFiles
from megatrain_launcher.etcd.place import LOCK, make_private, take_lock


class EtcdFiles(Closable):
    """The files of one directory, from `lock` to `close`. One thread calls `missing` and `restore`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._data = HeldFiles(directory / "etcd")
        self._kept: dict[Path, bytes] = {}
        """Small files, by path, that are rewritten when they are removed."""
        self._lock_file: io.FileIO | None = None

    def lock(self) -> None:
        """Exclude other launches from the directory. Raises: ConfigError."""
        before, self._lock_file = self._lock_file, take_lock(self._directory)
        if before is not None:
            before.close()

    def close(self) -> None:
        self._data.close()
        if self._lock_file is not None:
            self._lock_file.close()

    def keep(self, path: Path, content: bytes) -> None:
        """Write a small file that only this user can access, and rewrite it when it is removed. Raises: OSError."""
        write_private(path, content)
        self._kept = {**self._kept, path: content}

    def keep_existing(self, *paths: Path | None) -> None:
        """Rewrite these existing files when they are removed. Raises: OSError."""
        self._kept = {**self._kept, **{path: path.read_bytes() for path in paths if path is not None}}

    def drop(self, path: Path) -> None:
        """Remove a file that `keep` wrote."""
        self._kept = {kept: content for kept, content in self._kept.items() if kept != path}
        path.unlink(missing_ok=True)

    def missing(self, pid: int | None) -> set[str]:
        """Return the names of files that were removed, or replaced by others. pid: etcd's, if it runs."""
        found = {f"etcd/member/{name}" for name in self._data.poll(pid)}
        assert self._lock_file is not None
        if not is_in_place(self._lock_file.fileno(), self._directory / LOCK):
            found.add(LOCK)
        return found | {path.name for path in self._kept if not path.exists()}

    def restore(self, *, is_lock_missing: bool) -> None:
        """Restore the lock and the small files. Raises: OSError; ConfigError when another launch has the directory."""
        make_private(self._directory)
        if is_lock_missing:
            self.lock()
        for path, content in self._kept.items():
            if not path.exists():
                write_private(path, content)

    def restore_data(self) -> None:
        """Restore etcd's data as it is now, while etcd does not write. Raises: OSError."""
        self._data.copy()
