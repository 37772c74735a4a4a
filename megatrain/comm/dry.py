"""Groups without peers: one process simulates the exchanges of any rank. For planning and offline work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from megatrain.comm.communicator import Communicator
from megatrain.comm.device_stream import DeviceStreams, NoStream
from megatrain.comm.exchange import Exchange, ExchangeRunner, Work
from megatrain.comm.gloo import GlooCommunicator
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.lanes import AwaitedLane
from megatrain.comm.mesh import Mesh, build_mesh
from megatrain.comm.nccl import NcclCommunicator
from megatrain.contracts.layout import Holders, Layout
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder


class _DryRunner(ExchangeRunner):
    """Runs exchanges with their shapes, memory and order, but without the transfer."""

    def launch(self, exchange: Exchange) -> Work:
        return _NoWork()


class _NoWork:
    """The Work of an exchange that transfers nothing."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return True


@contextmanager
def dry_mesh(
    layout: Layout,
    rank: int,
    *,
    device_type: str = "cpu",
    has_wrap_links: bool = False,
    holders: Sequence[Holders] = (),
    has_sequence_chunks: bool = False,
) -> Iterator[Mesh]:
    """Yield the mesh of `rank` in `layout`, without peers, with the exchanges that it would have on `device_type`.

    has_wrap_links, holders, has_sequence_chunks: see create_mesh. On CPUs, a group whose exchanges are awaited later
    has at most two exchanges in progress at a time.
    """
    recorder = Recorder(BlackBoxWriter.anonymous())
    runner, streams = _DryRunner(recorder), DeviceStreams(NoStream)

    def connect(planned: PlannedGroup) -> Communicator:
        own, no_time = planned.ranks.index(rank), timedelta()
        # torch's types lack this constructor
        stub_group = ProcessGroup(own, len(planned.ranks))  # type: ignore[call-arg]
        if device_type == "cuda" and not planned.uses_cpu_memory:
            return NcclCommunicator(runner, planned, stub_group, no_time, streams)
        is_awaited_later = planned.is_awaited_later(has_sequence_chunks=has_sequence_chunks)
        new_lane = (lambda _: AwaitedLane()) if is_awaited_later else None
        return GlooCommunicator(runner, planned, stub_group, no_time, new_lane)

    yield build_mesh(
        layout, rank, torch.device(device_type), recorder, connect, has_wrap_links=has_wrap_links, holders=holders
    )
