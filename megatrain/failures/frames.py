"""Where in the program an exception came from, by the frames of its traceback."""

from __future__ import annotations

import re
from typing import Final

from megatrain.failures.lines import message_start
from megatrain.failures.verdict import Label

MAX_RANKS: Final = 64
"""Tracebacks of more ranks, interleaved in one log, forget the oldest."""

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
        self._places: dict[str | None, Label] = {}
        self._ignored: set[str | None] = set()

    def see(self, rank: str | None, line: str) -> None:
        """Take in a frame."""
        place = Label.DATA if _LOADING.search(line) else Label.STORAGE if _SAVING.search(line) else None
        if place is not None:
            self._places.pop(rank, None)
            self._places[rank] = place
            if len(self._places) > MAX_RANKS:
                del self._places[next(iter(self._places))]

    def ignore(self, rank: str | None) -> None:
        """Take notice that the exception which the rank's log shows next harmed nothing: Python was cleaning up."""
        if len(self._ignored) < MAX_RANKS:
            self._ignored.add(rank)

    def ends_ignored(self, rank: str | None, line: str) -> bool:
        """Say whether a line is the end of a traceback that harmed nothing."""
        if rank not in self._ignored or _EXCEPTION.match(line, message_start(line)) is None:
            return False
        self._ignored.discard(rank)
        self._places.pop(rank, None)
        return True

    def place_of(self, rank: str | None, line: str) -> Label | None:
        """Return what an exception at the end of the rank's frames is about, None when only the program's own code."""
        place = self._places.pop(rank, None)
        if place is None:
            return None
        if _ABOUT_FILES.search(line) or (place is Label.DATA and _ABOUT_VALUES.search(line)):
            return place
        return None
