"""NCCL: the exchanges of a GPU. They run on their own streams, in the order of submission (device_stream.py).

An exchange is launched when it is submitted. Waiting for it makes the compute stream wait, not the host. So this module
does not order exchanges and does not limit the time of a wait: NCCL's monitor enforces the group's timeout. The two
ranks of a link connect at their first message, which link_warmup.py sends before training.
Streams have priorities. Exchanges that the next kernel waits for are urgent: collectives of tensor parallelism and
messages between stages. Gradients and parameters, which replicas exchange, are large and needed later. Their stream
has low priority, since otherwise a message would wait for a whole bucket. The order of launches does not matter, so
CUDA_DEVICE_MAX_CONNECTIONS=1 is not needed; a small value only reduces overlap (training/device_settings.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megatrain.comm.communicator import HALF, Communicator, summed_parts
from megatrain.comm.device_stream import DeviceStreams
from megatrain.comm.exchange import Exchange, ExchangeRunner, Pending, Transfer
from megatrain.comm.group_creation import missing_members_error, new_process_group
from megatrain.comm.group_plan import PlannedGroup

# torch 2.13 renamed these two; the old names still work but warn
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclCommunicator(Communicator):
    """A group's exchanges. `streams`: those of the rank; the properties of the planned group select one of them."""

    connects_at_first_message = True
    is_asynchronous = False
    """A collective runs on the current stream."""

    def __init__(
        self,
        runner: ExchangeRunner,
        planned: PlannedGroup,
        process_group: dist.ProcessGroup,
        timeout: timedelta,
        streams: DeviceStreams,
    ) -> None:
        super().__init__(process_group, timeout)
        self._runner = runner
        self._planned = planned
        self._streams = streams

    def all_gather(self, x: Tensor, out: Tensor) -> Transfer:
        return Transfer(lambda: _ALL_GATHER(out, x, group=self.process_group))

    def reduce_scatter(self, x: Tensor, out: Tensor, *, sums_in_fp32: bool) -> Transfer:
        group = self.process_group
        if sums_in_fp32 and x.dtype in HALF:
            return summed_parts(x, out, group.size(), lambda parts: dist.all_to_all_single(parts, x, group=group))
        return Transfer(lambda: _REDUCE_SCATTER(out, x, group=group))

    def all_to_all(self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int]) -> Transfer:
        group = self.process_group
        return Transfer(lambda: dist.all_to_all_single(out, x, list(received), list(sent), group=group))

    def send(self, x: Tensor, peer: int) -> Transfer:
        return Transfer(lambda: dist.isend(x, peer, group=self.process_group))

    def receive(self, x: Tensor, peer: int) -> Transfer:
        return Transfer(lambda: dist.irecv(x, peer, group=self.process_group))

    def submit(self, result: Tensor, exchange: Exchange) -> Pending:
        return self._runner.submit_on(self._streams.of(self._planned, exchange.link), result, exchange)


def create_process_group(
    planned: PlannedGroup, rank: int, device: torch.device, store: dist.Store, timeout: timedelta
) -> dist.ProcessGroup:
    """Create a group on GPUs, whose members find each other through `store`.

    The members connect at once, except on links: there each pair of stages connects at its first message, on its own
    communicator. torch puts the messages of a communicator that exists from the start into one queue, where a receive
    that is posted ahead would block the sends behind it.
    Communication: one key written and one request that waits for the keys of all members, because NCCL itself would
    wait for them forever; then NCCL's own rendezvous.
    Raises: CommunicationError naming the group and the ranks that have not arrived.
    """
    arrivals = [f"{planned.key}/arrived/{index}" for index in range(len(planned.ranks))]
    with missing_members_error(planned, rank, store, arrivals, timeout):
        store.set(arrivals[planned.ranks.index(rank)], "1")
        store.wait(arrivals, timeout)
        group = new_process_group(
            planned,
            rank,
            "nccl",
            store,
            timeout,
            options=_options(planned, timeout),
            device=None if planned.is_link else device,
        )
    return group


def _options(planned: PlannedGroup, timeout: timedelta) -> Any:
    # the priority of torch's own streams, on which the messages of links run
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=not planned.is_of_replicas)
    options._timeout = timeout
    return options
