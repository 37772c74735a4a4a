"""The versions of topics, which /live sends to pages: numbers that grow when the responses on a topic may have changed.

A topic is the data of one view, or of a part of one: "series" is that of the charts, "ranks" that of the view Ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

TOPICS = (
    "overview", "series", "heat", "ranks", "stragglers", "incidents", "hosts", "checkpoints", "logs", "timeline",
)  # fmt: skip


class Versions:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = dict.fromkeys(TOPICS, 1)

    def bump(self, *topics: str) -> None:
        """Raise the versions of some topics."""
        with self._lock:
            for topic in topics:
                self._numbers[topic] += 1

    def now(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._numbers)
