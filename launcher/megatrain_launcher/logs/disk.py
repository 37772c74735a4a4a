"""A separate thread writes the logs of a host's ranks, so that a hung file system loses log lines but delays no step.

The queue is bounded. Bytes beyond the bound are dropped, and their number is written to the file once it can be written
again. Removed files are noticed within a second, even those of ranks that write nothing, and recreated.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from megatrain.contracts.files.vanished_files import RecentRemovals
from megatrain_launcher.logs.files import RotatingFile

_logger = logging.getLogger(__name__)
MAX_WAITING_BYTES: Final = 16 << 20
STUCK_S: Final = 5.0
"""A longer operation is reported as a problem; a busy disk takes less."""
_POLL_S: Final = 1.0
"""Pause between two checks whether files are still in place."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    file: RotatingFile
    chunk: bytes


@dataclass(frozen=True, slots=True)
class _Lost:
    file: RotatingFile
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Close:
    file: RotatingFile


_Order: TypeAlias = _Bytes | _Lost | _Close | threading.Event
"""The event is set when everything queued before it is done."""


@dataclass(slots=True)
class _WriteQueue:
    """The writes that wait for the disk; guarded by the condition."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    orders: deque[_Order] = field(default_factory=deque)
    waiting_bytes: int = 0
    lost: dict[int, _Lost] = field(default_factory=dict)
    """By the file's identity: the bytes that were dropped since bytes for it were last accepted."""
    busy_since: float | None = None
    is_closing: bool = False


class LogDisk:
    """Writes to files in the order of the calls. `write` and `close_file` never wait for the disk."""

    def __init__(self) -> None:
        self._removals = RecentRemovals()
        self._shared = _WriteQueue()
        self._thread = threading.Thread(target=self._run, name="log-disk", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Recent losses, and why lines may be lost soon; empty if all lines are written and kept."""
        return "; ".join((*self._removals.texts, *filter(None, [self._stuck()])))

    def _stuck(self) -> str:
        with self._shared.changed:
            since = self._shared.busy_since
        if since is None or (stuck_s := time.monotonic() - since) < STUCK_S:
            return ""
        return f"the file system of the ranks' logs has not answered for {stuck_s:.0f} s; training continues"

    def write(self, file: RotatingFile, chunk: bytes) -> None:
        """Append bytes to a file, or drop and count them if too much is queued."""
        shared = self._shared
        with shared.changed:
            lost = shared.lost.get(id(file))
            if shared.waiting_bytes + len(chunk) > MAX_WAITING_BYTES:
                shared.lost[id(file)] = _Lost(file, len(chunk) + (lost.num_bytes if lost else 0))
                return
            if lost is not None:
                shared.orders.append(shared.lost.pop(id(file)))
            shared.orders.append(_Bytes(file, chunk))
            shared.waiting_bytes += len(chunk)
            shared.changed.notify()

    def close_file(self, file: RotatingFile) -> None:
        """Close a file after all earlier writes to it."""
        with self._shared.changed:
            if id(file) in self._shared.lost:
                self._shared.orders.append(self._shared.lost.pop(id(file)))
            self._shared.orders.append(_Close(file))
            self._shared.changed.notify()

    def set_when_written(self, done: threading.Event) -> None:
        """Set an event once everything queued so far is in the files."""
        with self._shared.changed:
            self._shared.orders.append(done)
            self._shared.changed.notify()

    def close(self, timeout_s: float) -> None:
        """Finish the queued work, for at most `timeout_s`, and end the thread."""
        with self._shared.changed:
            self._shared.is_closing = True
            self._shared.changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        shared = self._shared
        files: dict[int, RotatingFile] = {}
        poll_at = time.monotonic() + _POLL_S
        while True:
            with shared.changed:
                left_s = max(0.0, poll_at - time.monotonic())
                shared.changed.wait_for(lambda: shared.orders or shared.is_closing, left_s)
                if shared.is_closing and not shared.orders:
                    return
                order = shared.orders.popleft() if shared.orders else None
                shared.busy_since = time.monotonic()
            if order is not None:
                self._carry_out(order, files)
            if time.monotonic() >= poll_at:
                for file in files.values():
                    self._check(file)
                poll_at = time.monotonic() + _POLL_S
            with shared.changed:
                shared.busy_since = None
                if isinstance(order, _Bytes):
                    shared.waiting_bytes -= len(order.chunk)

    def _carry_out(self, order: _Order, files: dict[int, RotatingFile]) -> None:
        """Carry out one queued order. `files`: the open files, by their identity."""
        match order:
            case _Bytes(file, chunk):
                files[id(file)] = file
                self._check(file)
                file.write(chunk)
            case _Lost(file, num_bytes):
                file.lose(num_bytes)
            case _Close(file):
                files.pop(id(file), None)
                file.close()
            case threading.Event():
                order.set()

    def _check(self, file: RotatingFile) -> None:
        if file.recreate_if_removed():
            text = self._removals.record(
                f"a log in {file.path.parent}", "its earlier lines are lost, and it is created again"
            )
            _logger.warning("%s", text)
