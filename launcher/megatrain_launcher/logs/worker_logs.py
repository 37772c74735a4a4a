"""The output of all workers of a host: read by one thread, kept in files, classified, and partly shown.

    <logs>/<host>/round-000001/rank-00003.log      stdout and stderr of rank 3, in the order in which it wrote them

A worker's two streams are one pipe. The thread reads output as soon as it arrives, its buffers are bounded, and
another thread writes to the disk. No worker therefore waits for a disk or for a reader of the executor's output. As the
log of a rank grows, it is searched for signs of a failure.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatrain.contracts.closable import Closable
from megatrain.run_files.run_directory import rank_log_path
from megatrain_job.failures.classifier import LogClassifier
from megatrain_job.failures.rule import HOST
from megatrain_job.failures.verdict import LABELS, Verdict
from megatrain_launcher.logs.disk import LogDisk
from megatrain_launcher.logs.files import RotatingFile
from megatrain_launcher.logs.tee import Tee, TeeChoice, is_shown

ALARM_WEIGHT: Final = HOST
"""A line of this weight or more shows that the host is broken, even if the process still runs."""

_logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S: Final = 0.5
"""Time limit for reading the last output of a worker that has exited."""
_PIPE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 18
_TEE_RETRY_S: Final = 0.05
_TEE_CLOSE_S: Final = 1.0


@dataclass(slots=True)
class LogWatch:
    """Classifies one rank's log: `feed` takes its bytes, and `finish` is called when its process has exited."""

    rank: int
    problem: str = ""
    """The reason why this log is no longer classified; empty while it is classified."""
    _classifier: LogClassifier = field(default_factory=LogClassifier)
    _has_alarmed: bool = False

    def feed(self, chunk: bytes) -> Verdict | None:
        """Read more of the log. Return the verdict, once, when a line shows that this host is broken."""
        if self.problem:
            return None
        try:
            self._classifier.feed(chunk)
        except Exception as error:
            # Training must continue. The same log may raise the error again, so it is no longer read.
            _logger.exception("the log of rank %d can no longer be classified", self.rank)
            self.problem = f"the log of rank {self.rank} is not classified ({type(error).__name__}: {error})"
            return None
        best = self._classifier.best
        if self._has_alarmed or best is None or best.weight < ALARM_WEIGHT:
            return None
        self._has_alarmed = True
        return self.verdict

    def finish(self) -> Verdict | None:
        """Read the last line, even without a newline, and return the verdict."""
        if not self.problem:
            self._classifier.finish()
        return self.verdict

    @property
    def verdict(self) -> Verdict | None:
        """The verdict so far; None while the log names no failure."""
        found = self._classifier.verdict
        return found if LABELS[found.label].is_failure else None


@dataclass(slots=True, eq=False)
class _Source:
    """One rank's pipe, and the destination of its bytes."""

    round: int
    rank: int
    read_fd: int
    file: RotatingFile
    watch: LogWatch
    is_shown: bool
    drained: list[threading.Event] = field(default_factory=list)
    """Set when everything that the rank wrote before it exited has been read."""
    is_open: bool = True

    @property
    def problem(self) -> str:
        return self.file.problem or self.watch.problem


@dataclass(slots=True)
class _PumpState:
    """State of the pump and its callers; guarded by the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sources: dict[int, _Source] = field(default_factory=dict)
    """By rank, of the open round."""
    new: list[_Source] = field(default_factory=list)
    old: list[_Source] = field(default_factory=list)
    old_closed: list[threading.Event] = field(default_factory=list)
    is_closing: bool = False


class WorkerLogs(Closable):
    """Keeps the logs of one host's workers. The reading thread calls `on_alarm(round, rank, verdict)`, which must not
    block.

    `file_at`: creates the file for a rank's lines at a path.
    """

    def __init__(
        self,
        host_logs: Path,
        *,
        tee: TeeChoice = "first",
        tee_fd: int = 1,
        file_at: Callable[[Path], RotatingFile] = RotatingFile,
        on_alarm: Callable[[int, int, Verdict], None] | None = None,
    ) -> None:
        self._host_logs = host_logs
        self._tee_choice = tee
        self._tee = Tee(tee_fd)
        self._disk = LogDisk()
        self._file_at = file_at
        self._on_alarm = on_alarm
        self._shared = _PumpState()
        self._selector = selectors.EpollSelector()
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self._pump = threading.Thread(target=self._run, name="log-pump", daemon=True)
        self._pump.start()

    @property
    def problem(self) -> str:
        """The reason why lines are lost or not classified; empty if all are kept and classified."""
        with self._shared.lock:
            found = {self._disk.problem, *(source.problem for source in self._shared.sources.values())} - {""}
        return "; ".join(sorted(found))

    def open_rank(self, round_number: int, rank: int) -> int:
        """Return the descriptor that a rank writes to; the caller closes it when the worker has its copy."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        with contextlib.suppress(OSError):  # the system's limit for all pipes of a user; the usual 64 KiB suffice
            fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        path = rank_log_path(self._host_logs, round_number, rank)
        source = _Source(
            round_number,
            rank,
            read_fd,
            self._file_at(path),
            LogWatch(rank),
            is_shown(self._tee_choice, rank),
        )
        with self._shared.lock:
            self._shared.sources[rank] = source
            self._shared.new.append(source)
        self._wake()
        return write_fd

    def log_verdict_at_end(self, rank: int, timeout_s: float = DRAIN_TIMEOUT_S) -> Verdict | None:
        """Return the verdict of a rank's log after its process has ended: everything that it wrote before is read
        first.

        This waits only for a reader that is far behind, at most timeout_s. None: the log names no failure.
        """
        with self._shared.lock:
            source = self._shared.sources.get(rank)
            if source is None:
                return None
            drained = threading.Event()
            source.drained.append(drained)
        self._wake()
        drained.wait(timeout_s)
        return source.watch.verdict

    def close_round(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Read the last output of the round's workers, which are all gone, and close their files."""
        closed = threading.Event()
        with self._shared.lock:
            self._shared.old += self._shared.sources.values()
            self._shared.sources.clear()
            self._shared.old_closed.append(closed)
        self._wake()
        closed.wait(timeout_s)

    def close(self) -> None:
        """Close the round and end the thread. Calling it again does nothing."""
        if not self._pump.is_alive():
            return
        self.close_round()
        with self._shared.lock:
            self._shared.is_closing = True
        self._wake()
        self._pump.join(_TEE_CLOSE_S + DRAIN_TIMEOUT_S)
        self._disk.close(DRAIN_TIMEOUT_S)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the socket is full: the pump wakes anyway
            self._wakeup_end.send(b"w")

    # The pump thread's methods

    def _run(self) -> None:
        shared = self._shared
        while True:
            with shared.lock:
                if shared.is_closing:
                    break
            for key, _ in self._selector.select(_TEE_RETRY_S if self._tee.has_waiting else None):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._wakeup.recv(4096)
                    self._take_requests()
                else:
                    self._read_once(key.data)
            self._tee.flush()
        self._tee.flush_all(_TEE_CLOSE_S)
        self._selector.close()
        self._wakeup.close()
        self._wakeup_end.close()

    def _take_requests(self) -> None:
        shared = self._shared
        with shared.lock:
            new, shared.new = shared.new, []
            old, shared.old = shared.old, []
            closed, shared.old_closed = shared.old_closed, []
            waited_for = [source for source in shared.sources.values() if source.drained]
        for source in new:
            self._selector.register(source.read_fd, selectors.EVENT_READ, source)
        for source in waited_for:
            self._drain(source)
        for source in old:
            self._drain(source)
            self._close_source(source)
            self._disk.close_file(source.file)
        for event in closed:
            self._disk.set_when_written(event)

    def _drain(self, source: _Source) -> None:
        """Read the bytes that are in a pipe now, at most _PIPE_BYTES: another process may continue to write to it."""
        num_bytes = 0
        while source.is_open and num_bytes < _PIPE_BYTES:
            num_read = self._read_once(source)
            if not num_read:
                break
            num_bytes += num_read
        source.watch.finish()
        with self._shared.lock:
            waiting, source.drained = source.drained, []
        for event in waiting:
            event.set()

    def _read_once(self, source: _Source) -> int:
        """Take one chunk out of a pipe; return its length, 0 when the pipe is empty now or at its end."""
        if not source.is_open:
            return 0
        try:
            chunk = os.read(source.read_fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not chunk:
            self._close_source(source)
            return 0
        self._disk.write(source.file, chunk)
        verdict = source.watch.feed(chunk)
        if source.is_shown:
            self._tee.feed(source.rank, chunk)
        if verdict is not None and self._on_alarm is not None:
            self._on_alarm(source.round, source.rank, verdict)
        return len(chunk)

    def _close_source(self, source: _Source) -> None:
        if source.is_open:
            source.is_open = False
            self._selector.unregister(source.read_fd)
            os.close(source.read_fd)
            if source.is_shown:
                self._tee.end(source.rank)
