"""Count wrong tokens by address: each address has a few attempts a minute."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

_WINDOW_S = 60.0
_MAX_ADDRESSES = 4096
"""Beyond this number the oldest addresses are dropped, so that memory stays bounded."""


class Attempts:
    """Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str, now_s: float) -> float:
        """Return how long an address must wait before its next token is checked; 0: not at all."""
        with self._lock:
            times = self._wrong.get(address)
            while times and times[0] <= now_s - _WINDOW_S:
                times.popleft()
            return times[0] + _WINDOW_S - now_s if times and len(times) >= self._most else 0.0

    def note_wrong(self, address: str, now_s: float) -> None:
        """Count a wrong token."""
        with self._lock:
            self._wrong.setdefault(address, deque(maxlen=self._most)).append(now_s)
            self._wrong.move_to_end(address)
            if len(self._wrong) > _MAX_ADDRESSES:
                self._wrong.popitem(last=False)
