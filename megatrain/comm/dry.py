"""Groups without peers: one process simulates the exchanges of any rank. For planning and offline work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatrain.comm.communicator import Communicator
from megatrain.comm.device_stream import DeviceStreams, NoStream
from megatrain.comm.exchange import Exchange, ExchangeRunner, Pending, Transfer, Work
from megatrain.comm.gloo import GlooCommunicator
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.lanes import AwaitedLane
from megatrain.comm.mesh import Mesh, build_mesh
from megatrain.comm.nccl import NcclCommunicator
from megatrain.contracts.layout import Holders, Layout
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder


class DryCommunicator(Communicator):
    """Another communicator's exchanges with their shapes, memory and order, but without the transfer."""

    def __init__(self, like: Communicator) -> None:
        super().__init__(like.timeout)
        self._like = like

    def all_gather(self, x: Tensor, out: Tensor) -> Transfer:
        return self._like.all_gather(x, out)

    def reduce_scatter(self, x: Tensor, out: Tensor, *, sums_in_fp32: bool) -> Transfer:
        return self._like.reduce_scatter(x, out, sums_in_fp32=sums_in_fp32)

    def all_to_all(self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]) -> Transfer:
        return self._like.all_to_all(x, out, sent, received)

    def all_reduce(self, x: Tensor, *, maximum: bool) -> Transfer:
        return self._like.all_reduce(x, maximum=maximum)

    def broadcast(self, x: Tensor, root: int) -> Transfer:
        return self._like.broadcast(x, root)

    def gather(self, x: Tensor, out: list[Tensor] | None, root: int) -> Transfer:
        return self._like.gather(x, out, root)

    def send(self, x: Tensor, peer: int) -> Transfer:
        return self._like.send(x, peer)

    def receive(self, x: Tensor, peer: int) -> Transfer:
        return self._like.receive(x, peer)

    def submit(self, result: Tensor, exchange: Exchange) -> Pending:
        # the reference to the transfer keeps the tensor to send in memory until the exchange has ended
        skipped = replace(exchange.transfer, start=partial(_skip, exchange.transfer))
        return self._like.submit(result, replace(exchange, transfer=skipped))


def _skip(_: Transfer) -> Work:
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
    has two exchanges in progress at a time.
    """
    recorder = Recorder(BlackBoxWriter.anonymous())
    runner, streams = ExchangeRunner(recorder), DeviceStreams(NoStream)

    def connect(planned: PlannedGroup) -> Communicator:
        own, no_time = planned.ranks.index(rank), timedelta()
        # torch's types lack this constructor
        stub_group = ProcessGroup(own, len(planned.ranks))  # type: ignore[call-arg]
        if device_type == "cuda" and not planned.uses_cpu_memory:
            return DryCommunicator(NcclCommunicator(runner, planned, stub_group, no_time, streams))
        is_awaited_later = planned.is_awaited_later(has_sequence_chunks=has_sequence_chunks)
        new_lane = (lambda _: AwaitedLane()) if is_awaited_later else None
        return DryCommunicator(GlooCommunicator(runner, planned, stub_group, no_time, new_lane))

    yield build_mesh(
        layout, rank, torch.device(device_type), recorder, connect, has_wrap_links=has_wrap_links, holders=holders
    )
