"""When work ran on the device, learned without ever waiting for it (MegaScale sec. 5.1, CUDA event monitor).

A timed stretch is two events recorded on the stream that is current at its launch and at its end. Their times are read
when the device has passed them, which costs a query and no synchronisation. Event pairs of one lane (one operation)
end in order, so each look asks only the head of each lane. Event times are relative: a base event ties them to the
monotonic clock. The base moves along, because float milliseconds lose digits, and is corrected by what must be true:
nothing starts before the host launched it, nothing ends after the host saw it end. The pool of events is bounded: a
device that does not answer must not cost memory without end, and what finds no event is left to the host's clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Protocol, Self

_REBASE_AFTER_NS = 4_000_000_000
"""A float of 4,000 ms still resolves 0.25 us."""
MAX_EVENTS = 16_384
"""Two a stretch: more than a host launches ahead of its device, as the driver's own queue ends at 1,024 launches."""


class DeviceEvent(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Self, /) -> float: ...


@dataclass(frozen=True, slots=True)
class _Stretch:
    token: int
    launch_ns: int
    start: DeviceEvent
    end: DeviceEvent


class DeviceTimer:
    """Times stretches of device work and hands them out when they are over.

    `make_event` gives an event that can measure time; `synchronize` waits for the device once, now, to set the clock.
    """

    def __init__(
        self,
        make_event: Callable[[], DeviceEvent],
        synchronize: Callable[[], None],
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._make_event = make_event
        self._clock = clock
        self._free: list[DeviceEvent] = []
        self._num_made = 0
        self._started: dict[int, tuple[int, int, DeviceEvent]] = {}
        self._lanes: dict[int, deque[_Stretch]] = {}
        self._lock = threading.Lock()
        self._base = make_event()
        synchronize()
        self._base.record()
        synchronize()
        self._base_ns = clock()

    def start(self, token: int, lane: int) -> None:
        """Note that the work of `token` is launched from here on, on the current stream."""
        event = self._event()
        if event is not None:
            self._started[token] = (lane, self._clock(), event)
            event.record()

    def stop(self, token: int) -> bool:
        """Note that the work of `token` is all launched, or waited for by the current stream.

        Return whether it will be handed out: not where there was no event for it.
        """
        started = self._started.pop(token, None)
        if started is None:
            return False
        lane, launch_ns, start = started
        end = self._event()
        if end is None:
            self._free.append(start)
            return False
        end.record()
        self._lanes.setdefault(lane, deque()).append(_Stretch(token, launch_ns, start, end))
        return True

    def resolved(self, lane: int | None = None) -> list[tuple[int, int, int]]:
        """Return (token, start, duration) in monotonic ns of what has ended since, in one lane or in all."""
        # Another thread that is looking will find the same; no thread waits for it.
        if not self._lock.acquire(blocking=False):
            return []
        try:
            lanes = list(self._lanes.values()) if lane is None else [self._lanes.get(lane, deque())]
            return [self._times(stretch) for waiting in lanes for stretch in self._ended(waiting)]
        finally:
            self._lock.release()

    def _ended(self, waiting: deque[_Stretch]) -> list[_Stretch]:
        ended: list[_Stretch] = []
        while waiting and waiting[0].end.query():
            ended.append(waiting.popleft())
        return ended

    def _times(self, stretch: _Stretch) -> tuple[int, int, int]:
        duration_ns = max(0, round(stretch.start.elapsed_time(stretch.end) * 1e6))
        start_ns = self._base_ns + round(self._base.elapsed_time(stretch.start) * 1e6)
        corrected_ns = max(min(start_ns, self._clock() - duration_ns), stretch.launch_ns)
        self._base_ns += corrected_ns - start_ns
        if abs(corrected_ns - self._base_ns) > _REBASE_AFTER_NS:
            self._free += [self._base, stretch.end]
            self._base, self._base_ns = stretch.start, corrected_ns
        else:
            self._free += [stretch.start, stretch.end]
        return stretch.token, corrected_ns, duration_ns

    def _event(self) -> DeviceEvent | None:
        try:
            return self._free.pop()
        except IndexError:
            if self._num_made >= MAX_EVENTS:
                return None
            self._num_made += 1
            return self._make_event()


def cuda_timer() -> DeviceTimer:
    """Return a timer for the current CUDA device. Loads torch; synchronises once."""
    import torch

    def make_event() -> DeviceEvent:
        event: DeviceEvent = torch.cuda.Event(enable_timing=True)
        return event

    return DeviceTimer(make_event, torch.cuda.synchronize)
