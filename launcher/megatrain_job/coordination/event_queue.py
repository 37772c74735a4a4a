"""A bounded queue between a watch's thread and its consumer, which either side can close.

While the queue is full, the watch waits and etcd keeps the events: nothing is dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EventQueue(Generic[Item]):
    """First in, first out. After `close` nothing can be added; the items in it can still be taken."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._error: Exception | None = None

    @property
    def is_closed(self) -> bool:
        with self._changed:
            return self._is_closed

    def put(self, item: Item) -> bool:
        """Add an item as soon as there is space. Return False, without adding, when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._capacity)
            if self._is_closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def take(self, timeout_s: float | None) -> Item | None:
        """Return the oldest item; None if none came in time, or the queue is closed and empty.

        Raises: the error that the queue was closed with, once it is empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._items, timeout_s)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            return None

    def close(self, error: Exception | None = None) -> None:
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                self._error = error
            self._changed.notify_all()
