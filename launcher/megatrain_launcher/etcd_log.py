"""Why an etcd of our own did not come up: what its log says in a few words, and whether its disk has room.

etcd logs JSON, and beside it the stacks of a Go program that gave up, which say nothing to whoever has a full disk.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatrain.contracts.texts import bytes_text

_LEVELS = ("error", "dpanic", "panic", "fatal")
_NUM_LINES = 3
_MAX_CHARS = 2000
_ROOM_BYTES = 64 * 2**20
"""etcd takes so much for its log of writes before it serves."""


def last_words(text: str) -> str:
    """Return the last complaints in a log of etcd; its end where there are none."""
    found = [words for line in text.splitlines() if (words := _complaint(line))]
    return "\n".join(dict.fromkeys(found[-_NUM_LINES:])) or text[-_MAX_CHARS:].strip() or "(it is empty)"


def lack_of_room(directory: Path) -> str:
    """Return a sentence when the directory's disk has too little room for an etcd, else nothing."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return ""
    if free >= _ROOM_BYTES:
        return ""
    return (
        f"its disk has {bytes_text(free)} left, and etcd begins with {bytes_text(_ROOM_BYTES)}; make room, or set "
        "job.run_directory"
    )


def _complaint(line: str) -> str:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(told, dict) or told.get("level") not in _LEVELS:
        return ""
    return ": ".join(str(told[name]) for name in ("msg", "error") if told.get(name))
