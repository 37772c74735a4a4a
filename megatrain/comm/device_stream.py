"""GPU streams for exchanges and for copies of inputs, in parallel with compute. Each runs its work in the order of
submission.

For exchanges they replace the streams inside torch's process groups: a collective that is not asynchronous runs on the
current stream (ProcessGroupNCCL, torch 2.8 and later). So events around it measure only the exchange, and several
groups can share a stream. Sends and receives are an exception: torch runs them on a separate stream for each pair of
ranks. A stream of this module waits for torch's stream, so that its order and its events cover sends and receives too
(ADR 0060).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from megatrain.comm.group_plan import PlannedGroup


class Mark(Protocol):
    """A point of a stream, like torch.cuda.Event."""

    def wait(self) -> None:
        """Make the current stream wait until the device has reached this point."""

    def query(self) -> bool:
        """Return whether the device has reached this point."""


class DeviceStream(Protocol):
    """A stream that runs in parallel with the compute stream."""

    def after_compute(self) -> AbstractContextManager[None]:
        """Make this stream wait for the current stream, and return a context in which this stream is current."""

    def beside_compute(self) -> AbstractContextManager[None]:
        """Return a context in which this stream is current. This stream waits for no other."""

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Let the current stream use tensors that were made in `beside_compute`: once they are freed, their memory is
        reused only after the work that the current stream has then. The current stream must wait for their content."""

    def mark(self) -> Mark:
        """Return the point after everything that was launched on this stream so far."""


class CudaStream:
    """A stream of the current GPU. is_urgent: its kernels have priority over those of other streams."""

    def __init__(self, *, is_urgent: bool) -> None:
        self._stream = torch.cuda.Stream(priority=-1 if is_urgent else 0)

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def beside_compute(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._stream)

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            x.record_stream(torch.cuda.current_stream())

    def mark(self) -> Mark:
        return self._stream.record_event()


class NoStream:
    """Replaces a stream where there is none: on a CPU, and in a dry run."""

    def __init__(self, *, is_urgent: bool) -> None:
        pass

    def after_compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    def beside_compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: there is one order of all work."""

    def mark(self) -> Mark:
        return _ReachedMark()


class _ReachedMark:
    def wait(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        return True


class NewStream(Protocol):
    """Makes a stream; its arguments are those of CudaStream."""

    def __call__(self, *, is_urgent: bool) -> DeviceStream: ...


class DeviceStreams:
    """The streams of a rank's exchanges, made at first use.

    They are few: the hardware has 8 queues unless CUDA_DEVICE_MAX_CONNECTIONS sets another number, and streams that
    share a queue wait for each other. Groups share a stream if all their members use them in the same order and at
    different times.
    """

    def __init__(self, new_stream: NewStream = CudaStream) -> None:
        self._new_stream = new_stream
        self._streams: dict[str, DeviceStream] = {}

    def of(self, group: PlannedGroup, link: str = "") -> DeviceStream:
        """Return the stream of a group's collectives, or of one of its links.

        All groups of replicas share one stream of low priority. The other groups along one axis share a stream of high
        priority, because the next kernel of the stage waits for their exchanges. Groups along the stages share one too:
        they do not communicate during a pass of the pipeline.
        """
        name = f"{group.name} {link}" if link else "replicas" if group.is_of_replicas else group.axis
        if name not in self._streams:
            self._streams[name] = self._new_stream(is_urgent=not group.is_of_replicas)
        return self._streams[name]
