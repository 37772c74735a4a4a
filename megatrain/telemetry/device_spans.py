"""Spans of device work: from their launch until the device has completed them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from time import monotonic_ns

from megatrain.contracts.black_box.encoding import Word
from megatrain.contracts.black_box.values import RecordFlag
from megatrain.telemetry.timers import DeviceTimer, DeviceTimes, Lane

_logger = logging.getLogger(__name__)

OpenSpan = tuple[int, int, int, int, int, int]
"""Start, operation number, bytes, group, collective_sequence, index of the record's first word."""
DEVICE_POSITION = RecordFlag.DEVICE_BEGUN | RecordFlag.DEVICE_AWAITED
_FOLLOW_AFTER_NS = 1_000_000_000
"""A step loop that has not polled the device for this long may be stuck."""


class DeviceSpans:
    """Times spans on the device.

    words: the words of the black box. unlaunched: the spans with work that the host is still launching, by token.
    change_flags: adds flags to the record of (token, index of its first word). end: called with each span that has
    ended, and its times. follow_after_ns: how long the step loop may leave the device unpolled.
    """

    def __init__(
        self,
        timer: DeviceTimer,
        words: memoryview,
        unlaunched: Mapping[int, OpenSpan],
        change_flags: Callable[[int, int, RecordFlag], None],
        end: Callable[[OpenSpan, DeviceTimes], None],
        follow_after_ns: int = _FOLLOW_AFTER_NS,
    ) -> None:
        self._timer = timer
        self._words = words
        self._unlaunched = unlaunched
        self._change_flags = change_flags
        self._end = end
        self._follow_after_ns = follow_after_ns
        self.num_failed_polls = 0
        """Polls of the follower in which the GPU driver returned an error."""
        self._launched: dict[int, OpenSpan] = {}
        self._resolving = threading.Lock()
        self._polled_ns = 0
        self._closed = threading.Event()
        self._follower: threading.Thread | None = None

    def start(self, token: int, number: int, group: int) -> None:
        """Record that the work of this span is launched from here on, on the current stream."""
        self._timer.start(token, (number, group))

    def launched(self, token: int, span: OpenSpan) -> bool:
        """Record that all work of this span is launched. Return whether the device times it."""
        self._launched[token] = span
        if self._timer.stop(token):
            self.resolve((span[1], span[3]))
            return True
        self._launched.pop(token)
        return False

    def get(self, token: int) -> OpenSpan | None:
        """Return a span that was launched and has not ended, or None."""
        return self._launched.get(token)

    def wait(self, token: int) -> None:
        """Record that the current stream waits from here on for the end of a launched span."""
        self._timer.wait(token)

    def resolve(self, lane: Lane | None = None) -> None:
        """Record the spans that the device has completed. Never waits for the device or for another call."""
        if not self._resolving.acquire(blocking=False):
            return
        try:
            self._polled_ns = monotonic_ns()
            for times in self._timer.resolved(lane):
                self._end(self._launched.pop(times.token), times)
        finally:
            self._resolving.release()

    def start_following(self) -> None:
        """Start a thread that records the device's progress even while the step loop is stuck."""
        self._follower = threading.Thread(target=self._follow_until_closed, name="device-follower", daemon=True)
        self._follower.start()

    def follow(self) -> None:
        """Record which spans the device has reached."""
        now = monotonic_ns()
        self.resolve()
        for token, has_begun, is_awaited in self._timer.reached():
            span = self._launched.get(token) or self._unlaunched.get(token)
            if span is not None:
                flags = RecordFlag.DEVICE_BEGUN if has_begun else RecordFlag.NONE
                self._change_flags(token, span[5], flags | RecordFlag.DEVICE_AWAITED if is_awaited else flags)
        self._words[Word.DEVICE_SEEN_NS] = now

    def close(self) -> None:
        """Record the spans that the device has completed, and stop following the device."""
        self._closed.set()
        if self._follower is not None:
            # a hanging driver blocks the query of an event, but must not block the exit of the process
            self._follower.join(timeout=self._follow_after_ns / 1e9)
        if self.num_failed_polls > 1:
            _logger.warning("%d polls of the device failed", self.num_failed_polls)
        self.resolve()

    def _follow_until_closed(self) -> None:
        while not self._closed.wait(self._follow_after_ns / 1e9):
            if monotonic_ns() - self._polled_ns >= self._follow_after_ns:
                try:
                    self.follow()
                except Exception as error:  # noqa: BLE001 -- whatever the GPU driver raises, a later poll may succeed
                    self._count_failure(error)

    def _count_failure(self, error: Exception) -> None:
        """Count a failed poll, and log the first. A poll that failed proves nothing about the device's position."""
        self.num_failed_polls += 1
        if self.num_failed_polls == 1:
            _logger.warning(
                "the device cannot be polled (%s): until a poll succeeds, a hang is judged by what the host launched",
                error,
            )
