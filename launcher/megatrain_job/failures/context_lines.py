"""Lines that give context to later lines: frames of tracebacks, torch elastic's table of failures, and sequence numbers
of collectives.

A frame shows in which part of the program an exception arose. The table names the rank and host of an exit code, and
the first failure. NCCL's watchdog prints the collectives that a rank entered, completed, and timed out in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from megatrain_job.failures.lines import message_start
from megatrain_job.failures.rule import ROOT_BONUS
from megatrain_job.failures.verdict import Label

MAX_RANKS: Final = 64
"""If tracebacks of more ranks are interleaved in one log, the oldest is dropped."""

_LOADING = re.compile(
    r"torch/utils/data/|site-packages/datasets/|webdataset|streaming/|data_?loader|[/_]dataset|datasets?\.py|indexed_|"
    r"tokeniz|in __getitem__|in collate|in _fetch|pyarrow/|PIL/",
    re.IGNORECASE,
)
_SAVING = re.compile(
    r"torch/distributed/checkpoint/|torch/serialization\.py|safetensors/|checkpointing\.py|checkpoint_engine|"
    r"in (?:save|load)_checkpoint|dist_checkpointing|in _?save_(?:checkpoint|state)",
    re.IGNORECASE,
)
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Empty|Full|Interrupt)(?:$|: )")
_ABOUT_FILES = re.compile(
    r"\b(?:OSError|IOError|FileNotFoundError|PermissionError|EOFError|TimeoutError|BlockingIOError|FileExistsError|"
    r"NotADirectoryError|IsADirectoryError)\b"
)
_ABOUT_VALUES = re.compile(
    r"\b(?:ValueError|RuntimeError|UnicodeDecodeError|AssertionError|struct\.error|ArrowException|OverflowError)\b"
)
_PARTS: Final = (
    (Label.DATA, _LOADING, (_ABOUT_FILES, _ABOUT_VALUES)),
    (Label.STORAGE, _SAVING, (_ABOUT_FILES,)),
)
"""Each row: a label, patterns of the stack frames of its part of the program, and patterns of the exceptions that get
the label if they arise there."""


class Frames:
    """Keeps, for each rank, which part of the program its newest traceback is in."""

    def __init__(self) -> None:
        self._label_of: dict[str | None, Label] = {}
        self._ignored: set[str | None] = set()

    def see(self, rank: str | None, line: str) -> None:
        """Process a frame."""
        label = next((label for label, frames, _ in _PARTS if frames.search(line)), None)
        if label is not None:
            self._label_of.pop(rank, None)
            self._label_of[rank] = label
            if len(self._label_of) > MAX_RANKS:
                del self._label_of[next(iter(self._label_of))]

    def ignore(self, rank: str | None) -> None:
        """Record that the next exception in the rank's log is harmless: it occurred while Python was cleaning up."""
        if len(self._ignored) < MAX_RANKS:
            self._ignored.add(rank)

    def ends_ignored(self, rank: str | None, line: str) -> bool:
        """Return whether a line is the end of a harmless traceback."""
        if rank not in self._ignored or _EXCEPTION.match(line, message_start(line)) is None:
            return False
        self._ignored.discard(rank)
        self._label_of.pop(rank, None)
        return True

    def label_of(self, rank: str | None, line: str) -> Label | None:
        """Return the label of the part of the program in which an exception arose, according to the rank's frames; None
        if that part gives this exception no label.
        """
        label = self._label_of.pop(rank, None)
        is_about = any(
            exception.search(line) for part, _, exceptions in _PARTS if part is label for exception in exceptions
        )
        return label if is_about else None


_HEAD = re.compile(r"(Root Cause \(first observed failure\))|Failures:")
_HOST = re.compile(r"^\W*host\s+: (\S+)")
_RANK = re.compile(r"^\W*rank\s+: (\d+) \(local_rank")
_ENTRY_LINE = re.compile(r"^\W*(?:exitcode|traceback)\s+: ")


@dataclass(frozen=True, slots=True)
class Entry:
    """The fields of a table entry that have been read so far."""

    named: dict[str, str]
    extra_weight: int


@dataclass(slots=True)
class FailureTable:
    """Reads the lines of torch elastic's table of failures."""

    _is_root: bool = False
    _named: dict[str, str] = field(default_factory=dict)

    def see(self, line: str) -> None:
        """Process a heading or a field."""
        head, host, rank = _HEAD.search(line), _HOST.match(line), _RANK.match(line)
        if host is not None:
            self._named = {"host": host[1]}
        elif rank is not None:
            # if the table has a host's line, it comes before the rank's
            self._named = {**({} if "rank" in self._named else self._named), "rank": rank[1]}
        elif head is not None:
            self._is_root, self._named = head[1] is not None, {}

    def entry_for(self, line: str) -> Entry | None:
        """Return the entry that a line completes; None for a line outside the table."""
        if not self._named or not _ENTRY_LINE.match(line):
            return None
        return Entry(dict(self._named), ROOT_BONUS if self._is_root else 0)


MAX_GROUPS: Final = 64

_GROUP = re.compile(r"PG (?:ID |GUID )?(\d+)")
_TIMED_OUT = re.compile(r"SeqNum=(\d+)")
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)", re.IGNORECASE)
_COMPLETED = re.compile(r"last completed (?:NCCL )?work: (-?\d+)", re.IGNORECASE)


@dataclass(slots=True)
class WatchdogSequences:
    """The newest sequence numbers in one rank's log, by process group."""

    timed_out: dict[str, int] = field(default_factory=dict)
    enqueued: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)

    def see(self, line: str) -> None:
        """Process a line of the watchdog."""
        found = _GROUP.search(line)
        group = found[1] if found else ""
        for numbers, pattern in (
            (self.timed_out, _TIMED_OUT),
            (self.enqueued, _ENQUEUED),
            (self.completed, _COMPLETED),
        ):
            number = pattern.search(line)
            if number is not None and (group in numbers or len(numbers) < MAX_GROUPS):
                numbers[group] = int(number[1])
