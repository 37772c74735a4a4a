"""Numbers that grow when the answer of a view may have changed: what /live tells pages."""

from __future__ import annotations

import threading
from collections.abc import Mapping

VIEWS = (
    "overview", "series", "heat", "grid", "stragglers", "incidents", "hosts", "checkpoints", "logs", "timeline",
)  # fmt: skip


class Versions:
    """For any threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = dict.fromkeys(VIEWS, 1)

    def bump(self, *views: str) -> None:
        """Have the answers of some views count as new."""
        with self._lock:
            for view in views:
                self._numbers[view] += 1

    def now(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._numbers)
