"""Collects Python stacks of this host's ranks by a signal, even if they hang: see megatrain/programs/stack_dumps.py.

For a process that does not answer, its state in /proc is reported: stopped, dead, or waiting in the kernel. The signal
is sent only to processes that have a black box on this host and a handler for the signal.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.contracts.black_box.reader import BlackBoxReader
from megatrain.contracts.errors import DataError
from megatrain.contracts.files.system_files import system_text
from megatrain.formatting import ranks_text
from megatrain.programs.processes import process_state
from megatrain.programs.stack_dumps import STACKS_FILE, STACKS_SIGNAL
from megatrain.run_files.run_directory import own_box_paths
from megatrain_diagnostics.analysis.stack_clusters import MAIN_THREAD
from megatrain_diagnostics.events.tables import Stacks, from_columns, num_rows

_logger = logging.getLogger(__name__)
_ANSWER_S = 2.0
"""Time to wait for the stacks of a process. A slower one waits in the kernel, or the machine is overloaded."""
_POLL_S = 0.02
_MAX_BYTES = 1 << 20
"""Limit of the size of one dump; faulthandler writes at most 100 threads of 100 frames."""
_MIN_INTERVAL_S = 10.0
"""Least time between two dumps of a host."""
_STATES = {"T": "stopped (T)", "t": "stopped by a debugger (t)", "Z": "dead (Z)", "X": "dead (X)", "": "gone"}
_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')


@dataclass(frozen=True, slots=True)
class DumpTarget:
    """A process whose stacks are to be dumped."""

    rank: int
    round: int
    pid: int


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The stack of a thread: one frame per line, outermost first, as "file:line function"."""

    thread: str
    stack: str


def targets_in(directory: Path, prefix: str, host: str) -> tuple[DumpTarget, ...]:
    """Return the ranks of the newest round that have a black box in a directory.

    With an empty `prefix`, boxes of any job count; with an empty `host`, boxes of any host. Files that are not black
    boxes are skipped.
    """
    found = []
    for path in own_box_paths(directory):
        name = path.name
        if not name.startswith(prefix) or not name.endswith(".blackbox") or ".previous." in name:
            continue
        try:
            with BlackBoxReader(path) as reader:
                identity = reader.identity
        except DataError:
            continue
        if host in ("", identity.host):
            found.append(DumpTarget(identity.rank, identity.round, identity.pid))
    newest = max((target.round for target in found), default=0)
    return tuple(target for target in found if target.round == newest)


def collect_stacks(targets: Sequence[DumpTarget], host: str, first_number: int, clock_ns: Callable[[], int]) -> Stacks:
    """Return the stacks of all threads of these processes; for a process without an answer, a row with the reason.

    All processes are signaled before any answer is read, so the call takes about two seconds at most.
    """
    asked = [(target, *_request_dump(target.pid)) for target in targets]
    deadline = time.monotonic() + _ANSWER_S
    rows: list[tuple[Any, ...]] = []
    for target, file, offset, problem in asked:
        threads = _read_dump(file, offset, deadline) if file is not None else []
        if not threads:
            problem = problem or f"no answer within {_ANSWER_S:g} s, {process_state_text(target.pid)}"
            threads = [ThreadStack(MAIN_THREAD, problem)]
        at_ns = clock_ns()
        rows += [(target, at_ns, thread) for thread in threads]
    return from_columns(
        Stacks,
        {
            "round": [target.round for target, _, _ in rows],
            "rank": [target.rank for target, _, _ in rows],
            "sequence": list(range(first_number, first_number + len(rows))),
            "at_ns": [at_ns for _, at_ns, _ in rows],
            "pid": [target.pid for target, _, _ in rows],
            "host": [host] * len(rows),
            "thread": [row.thread for _, _, row in rows],
            "stack": [row.stack for _, _, row in rows],
        },
    )


def process_state_text(pid: int) -> str:
    """Return the state of a process as text: "process is stopped (T)", "process waits in the kernel (D) in ..."."""
    state = process_state(pid)
    if state in _STATES:
        return f"process is {_STATES[state]}"
    where = _wchan(pid)
    if state == "D":
        return f"process waits in the kernel (D){f' in {where}' if where else ''}"
    return f"process is {'running' if state == 'R' else f'asleep ({state})'}{f' in {where}' if where else ''}"


def parse_dump(text: str) -> list[ThreadStack]:
    """Return the threads of a faulthandler dump; the last one is the main thread."""
    threads: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            threads.append((head["name"] or f"Thread {head[2]}", []))
        elif threads and (frame := _FRAME.match(line)) is not None:
            line_number = frame["line"] if frame["line"].isdecimal() else "0"
            threads[-1][1].append(f"{frame['file']}:{line_number} {frame['name']}")
        elif threads and line.strip():
            threads[-1][1].append(line.strip())
    found = [ThreadStack(name, "\n".join(reversed(frames))) for name, frames in threads]
    if found:
        found[-1] = ThreadStack(MAIN_THREAD, found[-1].stack)
    return found


class StackWatch:
    """Dumps the stacks of a host on request, in a background thread, at most once every ten seconds."""

    def __init__(
        self,
        host: str,
        targets: Callable[[], Iterable[DumpTarget]],
        send: Callable[[type[Stacks], Stacks], None],
        clock_ns: Callable[[], int],
    ) -> None:
        """`targets`: the processes to ask; `send` takes the rows."""
        self._host, self._targets, self._send, self._clock_ns = host, targets, send, clock_ns
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._dumped_s = -_MIN_INTERVAL_S
        self._thread = threading.Thread(target=self._run, name="stacks", daemon=True)
        self._thread.start()

    def request(self, ranks: tuple[int, ...] = ()) -> None:
        """Request a dump of all ranks of the host, because `ranks` make no progress. Returns at once."""
        if ranks:
            _logger.info("dumping stacks: no progress on %s", ranks_text(ranks))
        self._asked.put(True)

    def close(self) -> None:
        """Finish the requested dump."""
        self._asked.put(False)
        self._thread.join(2 * _ANSWER_S)

    def _run(self) -> None:
        while self._asked.get():
            now_s = time.monotonic()
            if now_s - self._dumped_s < _MIN_INTERVAL_S:
                continue
            self._dumped_s = now_s
            try:
                # numbers begin at the current time, so that they also grow over restarts and identify a dump
                stacks = collect_stacks(tuple(self._targets()), self._host, self._clock_ns(), self._clock_ns)
            except OSError as error:
                _logger.warning("stacks cannot be collected: %s", error)
                continue
            if num_rows(stacks):
                self._send(Stacks, stacks)


def _request_dump(pid: int) -> tuple[Path | None, int, str]:
    """Request the stacks of a process; return the file and the offset of its answer, or None and the reason."""
    if process_state(pid) in _STATES:
        return None, 0, process_state_text(pid)
    try:
        file = _stacks_file(pid)
        if file is None or not _handles_signal(pid):
            return None, 0, "the process does not support stack dumps"
        size = file.stat().st_size
        os.kill(pid, STACKS_SIGNAL)
        return file, size, ""
    except OSError as error:
        return None, 0, f"the stack dump cannot be requested: {error.strerror}"


def _read_dump(file: Path, offset: int, deadline: float) -> list[ThreadStack]:
    """Return the dump that begins at `offset`: when it is complete, or the part written until the deadline."""
    text, is_quiet = "", False
    while True:
        try:
            with file.open("rb") as opened:
                opened.seek(offset)
                fresh = opened.read(_MAX_BYTES).decode("utf-8", "replace")
        except OSError:
            return parse_dump(text)
        is_quiet, text = bool(fresh) and fresh == text, fresh
        # a dump is written without pauses: when the file stops growing, it is complete
        if is_quiet or time.monotonic() > deadline:
            return parse_dump(text)
        time.sleep(_POLL_S)


def _stacks_file(pid: int) -> Path | None:
    """Return the path in /proc of the open file to which a worker writes its dumps; None if it has none."""
    for link in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name)):
        try:
            if os.readlink(link).startswith(f"/memfd:{STACKS_FILE}"):
                return link
        except OSError:
            continue  # closed in the meantime
    return None


def _handles_signal(pid: int) -> bool:
    """Return whether a process has a handler for the signal; without a handler the signal would kill it."""
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _wchan(pid: int) -> str:
    text = system_text(Path(f"/proc/{pid}/wchan"))
    return "" if text == "0" else text
