"""The files of a running etcd, held open by this process, so that removed files can be restored unchanged.

A removed file continues to exist as long as a process has it open. etcd itself has its database and its log of writes
open, and would continue to accept writes into files that no restart finds. A process that holds the same files open can
copy them back: etcd is then restarted with the same data (ADR 0043). The etcd is stopped while its files are copied, so
that the copies are consistent.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatrain.contracts.files.vanished_files import is_in_place
from megatrain.contracts.files.whole_files import sync_directory, temporary_name
from megatrain.programs.child_process import ChildProcess

_MEMBER = "/member/"
_GONE = " (deleted)"
_DATABASE = "snap/db"
_COPIED_BYTES = 1 << 20

_STOPPED = "TtZX"
_POLL_S = 0.002
_TIMEOUT_S = 5.0


class HeldFiles:
    """The files of an etcd that a restart needs, below <data>/member. Not thread-safe."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._handles: dict[str, int] = {}
        """By name below <data>/member."""

    def poll(self, pid: int | None) -> tuple[str, ...]:
        """Hold etcd's current files open, and return the names of those that are missing; none: all files are in place.

        Files that etcd itself removes (old parts of its log, a database that was defragmented) may be returned for
        a moment.
        """
        opened = {} if pid is None else _opened_by(pid)
        for name, path in opened.items():
            self._hold(name, path)
        for path in self._snapshots():
            self._hold(f"snap/{path.name}", path)
        missing = tuple(
            name for name in self._needed(opened) if not is_in_place(self._handles[name], self._place(name))
        )
        if not missing:
            for name in [name for name, handle in self._handles.items() if not is_in_place(handle, self._place(name))]:
                os.close(self._handles.pop(name))
        return missing

    def copy(self) -> None:
        """Copy all held files to <data>, and move the files there aside. Raises: OSError.

        etcd must not write meanwhile. The copy then has the state that a power cut would leave.
        """
        draft = self._data.with_name(temporary_name(self._data.name))
        try:
            for name, handle in self._handles.items():
                _copy(handle, draft / "member" / name)
            for directory in (draft / "member" / "wal", draft / "member" / "snap", draft / "member", draft):
                directory.chmod(0o700)
                sync_directory(directory)
            if self._data.exists():
                self._data.rename(self._data.with_name(f"{self._data.name}.found-{secrets.token_hex(4)}"))
            draft.rename(self._data)
            sync_directory(self._data.parent)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _hold(self, name: str, path: Path) -> None:
        with suppress(OSError):  # etcd has closed the file since
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            known = self._handles.get(name)
            if known is not None and os.path.samestat(os.fstat(known), os.fstat(handle)):
                os.close(handle)
                return
            self._handles[name] = handle
            if known is not None:
                os.close(known)

    def _snapshots(self) -> list[Path]:
        """Return raft's snapshots, which etcd does not keep open."""
        return sorted((self._data / "member" / "snap").glob("*.snap"))

    def _needed(self, opened: Iterable[str]) -> list[str]:
        """Return the names of the held files without which a restart would fail or lose data."""
        logs = [name for name in opened if _is_log(name)] or sorted(filter(_is_log, self._handles))[-1:]
        newest = sorted(name for name in self._handles if name.endswith(".snap"))[-1:]
        return [name for name in (_DATABASE, *logs, *newest) if name in self._handles]

    def _place(self, name: str) -> Path:
        return self._data / "member" / name


def _is_log(name: str) -> bool:
    return name.startswith("wal/") and name.endswith(".wal")


def _opened_by(pid: int) -> dict[str, Path]:
    """Return the paths under /proc of the database and log files that a process has open, by name below member/."""
    found = {}
    directory = Path(f"/proc/{pid}/fd")
    with suppress(OSError):
        for entry in os.listdir(directory):
            with suppress(OSError):
                name = os.readlink(directory / entry).removesuffix(_GONE).rpartition(_MEMBER)[2]
                is_file = stat.S_ISREG((directory / entry).stat().st_mode)
                if is_file and (name == _DATABASE or _is_log(name)):
                    found[name] = directory / entry
    return found


def _copy(handle: int, path: Path) -> None:
    """Write a durable copy of an open file. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as copy:
        offset = 0
        while part := os.pread(handle, _COPIED_BYTES, offset):
            copy.write(part)
            offset += len(part)
        path.chmod(0o600)
        copy.flush()
        os.fsync(copy.fileno())


@contextmanager
def frozen(child: ChildProcess) -> Iterator[None]:
    """Stop a child during the block; it continues afterwards, unless it was killed.

    Raises: TimeoutError when one of its threads does not stop in time because it waits for a disk.
    """
    child.send(signal.SIGSTOP)
    try:
        deadline = time.monotonic() + _TIMEOUT_S
        while not _is_suspended(child.pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {child.pid} was not suspended within {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        yield
    finally:
        child.send(signal.SIGCONT)


def _is_suspended(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task")
    with suppress(FileNotFoundError):
        for name in os.listdir(tasks):
            with suppress(FileNotFoundError, ProcessLookupError):
                if (tasks / name / "stat").read_text().rpartition(")")[2].split()[0] not in _STOPPED:
                    return False
    return True
