"""Where in the program an exception came from, by the frames of its traceback."""

from __future__ import annotations

import re
from typing import Final

from megatrain_job.failures.lines import message_start
from megatrain_job.failures.verdict import Label

MAX_RANKS: Final = 64
"""When tracebacks of more ranks are interleaved in one log, the oldest is forgotten."""

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


class Frames:
    """Remembers for each rank in which part of the program its newest traceback is."""

    def __init__(self) -> None:
        self._label_of: dict[str | None, Label] = {}
        self._ignored: set[str | None] = set()

    def see(self, rank: str | None, line: str) -> None:
        """Process a frame."""
        label = Label.DATA if _LOADING.search(line) else Label.STORAGE if _SAVING.search(line) else None
        if label is not None:
            self._label_of.pop(rank, None)
            self._label_of[rank] = label
            if len(self._label_of) > MAX_RANKS:
                del self._label_of[next(iter(self._label_of))]

    def ignore(self, rank: str | None) -> None:
        """Note that the exception which the rank's log shows next did no harm: Python was cleaning up."""
        if len(self._ignored) < MAX_RANKS:
            self._ignored.add(rank)

    def ends_ignored(self, rank: str | None, line: str) -> bool:
        """Return whether a line is the end of a traceback that did no harm."""
        if rank not in self._ignored or _EXCEPTION.match(line, message_start(line)) is None:
            return False
        self._ignored.discard(rank)
        self._label_of.pop(rank, None)
        return True

    def label_of(self, rank: str | None, line: str) -> Label | None:
        """Return the part of the program in which an exception at the end of the rank's frames arose, None if only its
        own code.
        """
        label = self._label_of.pop(rank, None)
        if label is None:
            return None
        if _ABOUT_FILES.search(line) or (label is Label.DATA and _ABOUT_VALUES.search(line)):
            return label
        return None
