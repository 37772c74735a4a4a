"""Why the job's own etcd did not start: the errors in its log, and whether its disk has space.

etcd logs JSON lines. When it crashes, the log also has a Go stack trace, which does not name the cause.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatrain.formatting.quantities import bytes_text

_LEVELS = ("error", "dpanic", "panic", "fatal")
_NUM_LINES = 3
_MAX_CHARS = 2000
_MIN_FREE_BYTES = 64 * 2**20
"""Space that etcd takes for its log of writes before it serves."""


def last_errors(text: str) -> str:
    """Return the last errors in a log of etcd; the end of the log if there are none."""
    found = [error for line in text.splitlines() if (error := _error_of(line))]
    return "\n".join(dict.fromkeys(found[-_NUM_LINES:])) or text[-_MAX_CHARS:].strip() or "(it is empty)"


def lack_of_space(directory: Path) -> str:
    """Return a sentence if the directory's disk has too little space for an etcd, else an empty text."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return ""
    if free >= _MIN_FREE_BYTES:
        return ""
    return (
        f"its disk has {bytes_text(free)} left, and etcd needs {bytes_text(_MIN_FREE_BYTES)} to begin; free "
        "some, or set job.run_directory"
    )


def _error_of(line: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(entry, dict) or entry.get("level") not in _LEVELS:
        return ""
    return ": ".join(str(entry[name]) for name in ("msg", "error") if entry.get(name))
