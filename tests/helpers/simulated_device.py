"""GPUs in simulated time: streams, events and collectives, and a process group that behaves as NCCL's does.

Hosts only submit work, as to a GPU: their programs run to the end, one rank after another, while no time passes. Then
`Simulation.run` computes when each piece of work begins and ends. Work on a stream begins when the previous work has
ended. A collective of several ranks ends on all of them, its duration after the last of them has begun it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

NEVER = float("inf")
"""A time that never arrives. Work of this duration hangs."""


@dataclass(eq=False)
class DeviceWork:
    """A piece of work on a stream. Its times are in ns; they are NEVER until the device reaches it."""

    name: str
    duration_ns: float = 0.0
    meeting: DeviceMeeting | None = None
    after: SimulatedEvent | None = None
    event: SimulatedEvent | None = None
    begin_ns: float = NEVER
    end_ns: float = NEVER


@dataclass(eq=False)
class DeviceMeeting:
    """A collective: the work of all its members."""

    size: int
    members: list[DeviceWork] = field(default_factory=list)


class SimulatedEvent:
    """An event as torch.cuda.Event."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.at_ns = NEVER

    def record(self) -> None:
        self.at_ns = NEVER
        self._device.current.submit(DeviceWork("record", event=self))

    def wait(self) -> None:
        self._device.current.submit(DeviceWork("wait", after=self))

    def query(self) -> bool:
        return self.at_ns <= self._device.now_ns()

    def elapsed_time(self, end_event: SimulatedEvent, /) -> float:
        return (end_event.at_ns - self.at_ns) / 1e6


class SimulatedStream:
    """A stream: work begins when all earlier work has ended."""

    def __init__(self, device: SimulatedDevice, *, is_urgent: bool = True) -> None:
        self._device = device
        self.is_urgent = is_urgent
        self.submitted: list[DeviceWork] = []

    def submit(self, work: DeviceWork) -> DeviceWork:
        self.submitted.append(work)
        return work

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        before, ready = self._device.current, self._device.event()
        ready.record()
        self._device.current = self
        ready.wait()
        try:
            yield
        finally:
            self._device.current = before

    def mark(self) -> SimulatedEvent:
        event = self._device.event()
        self.submit(DeviceWork("record", event=event))
        return event


class SimulatedDevice:
    """The GPU of a rank. now_ns: the latest time that its host can see; by default the whole simulated time."""

    def __init__(self) -> None:
        self.now_ns: Callable[[], float] = lambda: sys.float_info.max
        self.streams: list[SimulatedStream] = []
        self.current = self.new_stream(is_urgent=True)

    def new_stream(self, *, is_urgent: bool) -> SimulatedStream:
        self.streams.append(SimulatedStream(self, is_urgent=is_urgent))
        return self.streams[-1]

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def launch(self, name: str, duration_ns: float) -> DeviceWork:
        return self.current.submit(DeviceWork(name, duration_ns))

    def forget(self) -> None:
        """Forget all work that has ended, so that a long simulation stays cheap."""
        for stream in self.streams:
            stream.submitted = [work for work in stream.submitted if work.end_ns == NEVER]

    def all_work(self) -> list[DeviceWork]:
        return [work for stream in self.streams for work in stream.submitted]


class Simulation:
    """All devices, and the collectives that connect them.

    gap_ns: the time from the end of the work that a piece of work waits for until its start, on a stream and between
    two streams.
    """

    def __init__(self, num_ranks: int) -> None:
        self.gap_ns = 0.0
        self.devices = [SimulatedDevice() for _ in range(num_ranks)]
        self._meetings: dict[tuple[Any, ...], DeviceMeeting] = {}

    def meet(self, key: tuple[Any, ...], size: int, work: DeviceWork) -> None:
        work.meeting = self._meetings.setdefault(key, DeviceMeeting(size))
        work.meeting.members.append(work)

    def run(self, now_ns: float = 0.0) -> None:
        """Let all devices work from `now_ns` on, until no work can continue."""
        while any(self._advance(stream, now_ns) for device in self.devices for stream in device.streams):
            pass

    def _advance(self, stream: SimulatedStream, now_ns: float) -> bool:
        """Return whether this stream made progress."""
        clock, has_moved = now_ns, False
        for work in stream.submitted:
            if work.begin_ns == NEVER:
                ready = work.after.at_ns if work.after is not None else 0.0
                if ready == NEVER:
                    return has_moved
                work.begin_ns, has_moved = max(clock, ready) + self.gap_ns, True
            if work.end_ns == NEVER:
                begun = (
                    [member.begin_ns for member in work.meeting.members]
                    if work.meeting is not None
                    else [work.begin_ns]
                )
                is_missed = work.meeting is not None and len(begun) < work.meeting.size
                if NEVER in begun or is_missed or work.duration_ns == NEVER:
                    return has_moved
                work.end_ns, has_moved = max(begun) + work.duration_ns, True
                if work.event is not None:
                    work.event.at_ns = work.end_ns
            clock = work.end_ns
        return has_moved


class SimulatedNccl(dist.ProcessGroup):
    """A group, on one rank, that behaves as NCCL's does since torch 2.8.

    Collectives run on the current stream, or, if they are asynchronous, on a stream of the group. Messages run on a
    stream for each peer. durations: of an exchange in ns, by the name of torch's method.
    """

    def __init__(
        self, simulation: Simulation, name: str, ranks: tuple[int, ...], rank: int, durations: Mapping[str, float]
    ) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self._simulation, self._ranks, self._name, self._durations = simulation, ranks, name, durations
        self._index, self._device = ranks.index(rank), simulation.devices[rank]
        self._own_streams: dict[str, SimulatedStream] = {}
        self._num_calls: dict[str, int] = {}
        # torch requests the place of a global rank in the group from it; the entry ends with this object.
        distributed_c10d._world.pg_group_ranks[self] = {one: index for index, one in enumerate(ranks)}

    def allreduce(self, tensors: object, opts: Any) -> SimulatedWork | None:
        return self._collective("allreduce", opts)

    def broadcast(self, tensors: object, opts: Any) -> SimulatedWork | None:
        return self._collective("broadcast", opts)

    def all_gather_single(self, out: object, x: object, opts: Any) -> SimulatedWork | None:
        return self._collective("all_gather", opts)

    def reduce_scatter_single(self, out: object, x: object, opts: Any) -> SimulatedWork | None:
        return self._collective("reduce_scatter", opts)

    def all_to_all_single(self, out: object, x: object, sizes: object, sent: object, opts: Any) -> SimulatedWork | None:
        return self._collective("all_to_all", opts)

    def gather(self, out: object, x: object, opts: Any) -> SimulatedWork | None:
        return self._collective("gather", opts)

    def send(self, tensors: object, target: int, tag: int) -> SimulatedWork:
        return self._message(f"{self._index} to {target}")

    def recv(self, tensors: object, source: int, tag: int) -> SimulatedWork:
        return self._message(f"{source} to {self._index}")

    def _collective(self, method: str, opts: Any) -> SimulatedWork | None:
        if not opts.asyncOp:
            self._exchange(method, "", len(self._ranks))
            return None
        stream = self._own_stream("")
        with stream.after_compute():
            self._exchange(method, "", len(self._ranks))
        return SimulatedWork(stream.mark())

    def _message(self, link: str) -> SimulatedWork:
        stream = self._own_stream(link)
        with stream.after_compute():
            self._exchange("send", link, 2)
        return SimulatedWork(stream.mark())

    def _exchange(self, method: str, link: str, num_members: int) -> None:
        number = self._num_calls[link] = self._num_calls.get(link, 0) + 1
        work = self._device.launch(f"{self._name} {method}", self._durations[method])
        self._simulation.meet((self._name, self._ranks, link, number), num_members, work)

    def _own_stream(self, link: str) -> SimulatedStream:
        if link not in self._own_streams:
            self._own_streams[link] = self._device.new_stream(is_urgent=True)
        return self._own_streams[link]


class SimulatedWork:
    """The handle of an asynchronous exchange."""

    def __init__(self, end: SimulatedEvent) -> None:
        self._end = end

    def wait(self) -> None:
        self._end.wait()

    def is_completed(self) -> bool:
        return self._end.query()
