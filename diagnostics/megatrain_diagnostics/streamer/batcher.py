"""Rows on their way to the sender: joined until there are enough of them, or the oldest is old enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatrain_diagnostics.events.tables import Table, joined, num_rows

MAX_ROWS = 512
MAX_AGE_S = 1.0


class Batcher:
    """Collects tables and passes them on by kind. For one thread."""

    def __init__(self, send: Callable[[Any, Any], None]) -> None:
        self._send = send
        self._waiting: dict[type[Table], list[Any]] = {}
        self._num_rows: dict[type[Table], int] = {}
        self._oldest_s: dict[type[Table], float] = {}
        self.num_sent: dict[str, int] = {}
        """Rows passed on, by table."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, kind: type[Table], table: Table, now_s: float) -> None:
        count = num_rows(table)
        if count:
            self._waiting.setdefault(kind, []).append(table)
            self._num_rows[kind] = self._num_rows.get(kind, 0) + count
            self._oldest_s.setdefault(kind, now_s)

    def flush(self, now_s: float, *, is_all: bool = False) -> None:
        """Pass on the tables that are due, or all."""
        for kind in list(self._waiting):
            if is_all or self._num_rows[kind] >= MAX_ROWS or now_s - self._oldest_s[kind] >= MAX_AGE_S:
                del self._oldest_s[kind]
                count = self._num_rows.pop(kind)
                self.num_sent[kind.NAME] = self.num_sent.get(kind.NAME, 0) + count
                self._send(kind, joined(kind, self._waiting.pop(kind)))
