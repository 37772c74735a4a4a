"""When work ran on the device, measured without ever waiting for the device (MegaScale sec. 5.1, CUDA event monitor).

A timed stretch is two events, recorded on the stream that is current at its launch and at its end. Their times are read
when the device has passed them, which costs a query and no synchronization. Event pairs of one lane (an operation of a
group, on one stream) end in order, so each poll queries only the head of each lane. Event times are relative to a base
event, which ties them to the monotonic clock. The base is replaced from time to time, because float milliseconds lose
precision. Two invariants correct it: no work starts before the host launched it, and no work ends after the host
observed its end. The pool of events is bounded, so that a device that does not respond cannot use up the memory. A
stretch without an event is timed by the host's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from time import monotonic_ns
from typing import NamedTuple, Protocol, Self

_REBASE_AFTER_NS = 4_000_000_000
"""A float of 4,000 ms still resolves 0.25 us."""
MAX_EVENTS = 16_384
"""Two or three per stretch: more than a host launches ahead of its device, because the driver's own queue holds only
1,024 launches."""


Lane = tuple[int, int]
"""The numbers of an operation and of a group, 0 for none."""


class DeviceEvent(Protocol):
    """The part of torch.cuda.Event that is used here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Self, /) -> float: ...


@dataclass(slots=True)
class _Stretch:
    """Device work between two events on one stream."""

    token: int
    launch_ns: int
    start: DeviceEvent
    end: DeviceEvent
    wait: DeviceEvent | None = None
    """Where compute begins to wait for the end."""


class DeviceTimes(NamedTuple):
    """When a stretch ran, in monotonic ns, and for how long of it the compute stream waited for its end."""

    token: int
    start_ns: int
    duration_ns: int
    awaited_ns: int


class DeviceTimer:
    """Times stretches of device work and returns their times when they are over.

    `make_event` returns an event that can measure time. `synchronize` waits for the device; only the constructor calls
    it, to set the clock.
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
        self._started: dict[int, tuple[Lane, int, DeviceEvent]] = {}
        self._lanes: dict[Lane, deque[_Stretch]] = {}
        self._stopped: dict[int, _Stretch] = {}
        self._base = make_event()
        synchronize()
        self._base.record()
        synchronize()
        self._base_ns = clock()

    def start(self, token: int, lane: Lane) -> None:
        """Record that the host launches the work of `token` from here on, on the current stream."""
        event = self._event()
        if event is not None:
            self._started[token] = (lane, self._clock(), event)
            event.record()

    def stop(self, token: int) -> bool:
        """Record that the host has launched all work of `token`, or that the current stream waits for it.

        Return whether `resolved` will return it, which needs a free event.
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
        self._stopped[token] = stretch = _Stretch(token, launch_ns, start, end)
        self._lanes.setdefault(lane, deque()).append(stretch)
        return True

    def wait(self, token: int) -> None:
        """Record that the current stream waits from here on for the end of `token`."""
        stretch = self._stopped.get(token)
        wait = None if stretch is None else self._event()
        if stretch is not None and wait is not None:
            wait.record()
            stretch.wait = wait

    def resolved(self, lane: Lane | None = None) -> list[DeviceTimes]:
        """Return the times of the stretches that have ended since the last call, in one lane or in all.

        One thread at a time may call it.
        """
        lanes = list(self._lanes.values()) if lane is None else [self._lanes.get(lane, deque())]
        # all queries come first: if one raises, no stretch is lost
        ended = [(waiting, self._num_ended(waiting)) for waiting in lanes]
        return [self._times(self._taken(waiting)) for waiting, number in ended for _ in range(number)]

    def reached(self) -> list[tuple[int, bool, bool]]:
        """Return (token, has begun, compute waits for its end) of the stretches that the device has reached but not
        ended."""
        found = [(token, True, False) for token, (_, _, start) in list(self._started.items()) if start.query()]
        for waiting in list(self._lanes.values()):
            for stretch in list(waiting):
                has_begun = stretch.start.query()
                is_awaited = stretch.wait is not None and stretch.wait.query()
                if not has_begun and not is_awaited:
                    break  # the later ones of a lane begin and are awaited later
                found.append((stretch.token, has_begun, is_awaited))
        return found

    @staticmethod
    def _num_ended(waiting: deque[_Stretch]) -> int:
        return sum(1 for _ in takewhile(lambda stretch: stretch.end.query(), list(waiting)))

    def _taken(self, waiting: deque[_Stretch]) -> _Stretch:
        stretch = waiting.popleft()
        self._stopped.pop(stretch.token, None)
        return stretch

    def _times(self, stretch: _Stretch) -> DeviceTimes:
        awaited_ns = 0
        if stretch.wait is not None:
            # if compute has not reached the wait yet, it will not have to wait
            if stretch.wait.query():
                awaited_ns = max(0, round(stretch.wait.elapsed_time(stretch.end) * 1e6))
            self._free.append(stretch.wait)
        duration_ns = max(0, round(stretch.start.elapsed_time(stretch.end) * 1e6))
        start_ns = self._base_ns + round(self._base.elapsed_time(stretch.start) * 1e6)
        corrected_ns = max(min(start_ns, self._clock() - duration_ns), stretch.launch_ns)
        self._base_ns += corrected_ns - start_ns
        if abs(corrected_ns - self._base_ns) > _REBASE_AFTER_NS:
            self._free += [self._base, stretch.end]
            self._base, self._base_ns = stretch.start, corrected_ns
        else:
            self._free += [stretch.start, stretch.end]
        return DeviceTimes(stretch.token, corrected_ns, duration_ns, min(awaited_ns, duration_ns))

    def _event(self) -> DeviceEvent | None:
        try:
            return self._free.pop()
        except IndexError:
            if self._num_made >= MAX_EVENTS:
                return None
            self._num_made += 1
            return self._make_event()


def cuda_timer() -> DeviceTimer:
    """Return a timer for the current CUDA device. Loads torch; synchronizes once."""
    import torch

    def make_event() -> DeviceEvent:
        event: DeviceEvent = torch.cuda.Event(enable_timing=True)
        return event

    return DeviceTimer(make_event, torch.cuda.synchronize)
