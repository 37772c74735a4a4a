"""The audit log of user actions on a job, <run>/diagnosis/actions.jsonl: one line before each action, one after it.

The dashboard writes it, and so does the command line for notes (megatrain_job.jobs.notes). Each line holds the hash of
the line before and its own, SHA-256 over its canonical JSON. So a changed or removed line breaks the chain; a break is
reported and never repaired. Lines are appended under a lock of the file and are durable when `append` returns. An
action is not carried out if its line cannot be written. Removing the last lines leaves an intact chain. So a process
also checks that the newest entry that it wrote is still there; later entries of other processes have no such check.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.bounded_files import read_bounded
from megatrain.contracts.files.file_locks import wait_and_lock
from megatrain.contracts.files.whole_files import sync_directory
from megatrain.contracts.records.record import SCHEMA_VERSION, from_plain, to_plain

ACTIONS_NAME = "actions.jsonl"
INTENT, RESULT = "intent", "result"
_NO_HASH = "0" * 64
_MAX_BYTES = 64 << 20
"""The largest file to read: more than a year of actions at the highest rate that the limits allow."""
_MAX_LINE_BYTES = 64 * 1024
"""An upper bound: a reason has at most 500 characters, an answer of the driver is a sentence."""


@dataclass(frozen=True, slots=True)
class ActionEntry:
    """A line. `stage`: "intent" before the action, "result" after it, with the same `action_id`."""

    at_unix_s: float
    stage: str
    action_id: str
    idempotency_key: str
    user: str
    role: str
    address: str
    kind: str
    target: str
    reason: str
    is_accepted: bool = False
    is_done: bool = False
    text: str = ""
    prev_hash: str = ""
    entry_hash: str = ""


@dataclass(frozen=True, slots=True)
class ActionTrail:
    """The content of the file. `problem`: a sentence on where the chain breaks; empty while it is intact."""

    entries: tuple[ActionEntry, ...] = ()
    problem: str = ""


class ActionLog:
    """Appends to the audit log of a run. Several threads and several processes may append at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._newest_hash = ""
        self._loss = ""

    def append(self, entry: ActionEntry, check: Callable[[ActionTrail], None] = lambda _: None) -> ActionEntry:
        """Write a line, durable when this returns; return it with its hashes. Raises: OSError.

        `check` gets the earlier entries under the file's lock; if it raises, nothing is written.
        """
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            with open(_opened(self._path), "ab+", buffering=0) as file:
                wait_and_lock(file.fileno())  # on a file system without locks, simultaneous appends break the chain
                before = read_actions(self._path)
                self._record_loss(before)
                check(before)
                last, is_cut = _last_line(file.fileno())
                entry = chained(replace(entry, prev_hash=_hash_of(last) if last else _NO_HASH))
                line = json.dumps(_plain(entry), separators=(",", ":")).encode() + b"\n"
                # after an incomplete line, begin a new one
                line = b"\n" + line if is_cut else line
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "only a part could be written")
                os.fsync(file.fileno())
            if is_new:
                sync_directory(self._path.parent)
            self._newest_hash = entry.entry_hash
        return entry

    def trail(self) -> ActionTrail:
        """Return all entries so far. Raises: OSError."""
        with self._lock:
            trail = read_actions(self._path)
            self._record_loss(trail)
        return replace(trail, problem=trail.problem or self._loss)

    def _record_loss(self, trail: ActionTrail) -> None:
        """Record that this process's newest entry is missing: the next append would hide that."""
        newest = self._newest_hash
        if newest and all(entry.entry_hash != newest for entry in trail.entries):
            self._loss = f"{self._path.name}: the newest entry is missing: lines were removed"


def _opened(path: Path) -> int:
    """Open the file to read and append. Neither the file nor its directory may be a link. Raises: OSError.

    In a run directory of another user, a link must not redirect a note into one of the writer's own files.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path.name, flags, 0o644, dir_fd=directory)
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return file


def read_actions(path: Path) -> ActionTrail:
    """Return the entries in order, and where the chain breaks; no entries without a file. Raises: OSError."""
    try:
        lines = read_bounded(path, _MAX_BYTES).split(b"\n")
    except FileNotFoundError:
        return ActionTrail()
    entries: list[ActionEntry] = []
    problems: list[str] = []
    before = _NO_HASH
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        entry = _entry(line, f"{path.name}:{number}")
        if entry is None:
            problems.append(f"{path.name}:{number} is damaged")
        else:
            if entry.entry_hash != _hash_of(line):
                problems.append(f"{path.name}:{number} was changed: its hash is not that of its content")
            elif entry.prev_hash != before:
                problems.append(f"{path.name}:{number} does not follow the line before it: one was changed or removed")
            entries.append(entry)
        before = _hash_of(line)
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return ActionTrail(tuple(entries), f"{problems[0]}{more}" if problems else "")


def chained(entry: ActionEntry) -> ActionEntry:
    """Return an entry with the hash of its content."""
    return replace(entry, entry_hash=_digest(_plain(entry)))


def _plain(entry: ActionEntry) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **to_plain(entry)}


def _digest(plain: Mapping[str, Any]) -> str:
    content = {name: value for name, value in plain.items() if name != "entry_hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _hash_of(line: bytes) -> str:
    """Return the hash that the line after this one must hold. Works also for a line that cannot be parsed."""
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError):
        plain = None
    return _digest(plain) if isinstance(plain, dict) else hashlib.sha256(line).hexdigest()


def _entry(line: bytes, location: str) -> ActionEntry | None:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(plain, dict) or plain.get("schema_version") != SCHEMA_VERSION:
        return None
    if {field.name for field in fields(ActionEntry)} - plain.keys():
        return None
    try:
        return from_plain(ActionEntry, plain, location)
    except CoordinationError:
        return None


def _last_line(file: int) -> tuple[bytes, bool]:
    """Return the last line that is not empty, and whether it lacks its line feed."""
    size = os.fstat(file).st_size
    tail = os.pread(file, min(size, _MAX_LINE_BYTES), max(0, size - _MAX_LINE_BYTES))
    is_cut = bool(tail) and not tail.endswith(b"\n")
    return next((line for line in reversed(tail.split(b"\n")) if line), b""), is_cut
