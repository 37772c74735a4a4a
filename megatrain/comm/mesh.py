"""The 3D mesh: this rank's groups along each axis, and its channels to the neighbouring stages.

Groups are created by their members alone, each rank going through the same kinds in the same order; every kind
partitions the ranks that take part in it, so no creation waits for an unrelated one (MegaScale sec. 3.5).
Axes: tp, dp, pp; `host` has the same once more, on CPU memory. The `embedding` group joins the first and last stage of
a pipeline, which both hold a tied embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from megatrain.comm.channel import Channel, LocalChannel
from megatrain.comm.group import Group, brief
from megatrain.comm.host_groups import HostGroups
from megatrain.comm.priorities import nccl_options
from megatrain.comm.process import set_world_timeout
from megatrain.comm.queue import CommunicationQueue, Exchange, Lane
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.layout import Coordinate, Layout
from megatrain.contracts.operations import Operation
from megatrain.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Links:
    """The channels of one stage. Activations go to the next stage, and from the last to the first (next chunk)."""

    forward_to_next: Channel | LocalChannel
    forward_from_previous: Channel | LocalChannel
    backward_to_previous: Channel | LocalChannel
    backward_from_next: Channel | LocalChannel


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place, groups and links. `links` is None where one stage has the whole model as one chunk."""

    layout: Layout
    rank: int
    coordinate: Coordinate
    device: torch.device
    recorder: Recorder
    tp: Group
    dp: Group
    pp: Group
    embedding: Group
    host: HostGroups
    links: Links | None

    @property
    def is_first_stage(self) -> bool:
        return self.coordinate.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinate.pp == self.layout.pp_size - 1

    @property
    def is_alone(self) -> bool:
        return self.layout.world_size == 1

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of this rank, each once."""
        found = [self.tp, self.dp, self.pp, self.embedding, *self.host.groups]
        if self.links is not None:
            channels = (self.links.forward_to_next, self.links.forward_from_previous,
                        self.links.backward_to_previous, self.links.backward_from_next)  # fmt: skip
            for channel in channels:
                if isinstance(channel, Channel) and all(channel.group is not group for group in found):
                    found.append(channel.group)
        return tuple(found)

    def set_timeout(self, seconds: float) -> None:
        """Bound every later exchange on every group and on the world group."""
        for group in self.groups:
            group.set_timeout(seconds)
        set_world_timeout(seconds)

    def sum_over_all(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, made axis by axis. In place, blocks.

        Communication: a small all-reduce over tp, pp and dp in turn; no group of all ranks is needed.
        """
        self.tp.all_reduce(x, Operation.TP_ALL_REDUCE).wait()
        self.pp.all_reduce(x, Operation.PP_ALL_REDUCE).wait()
        return self.dp.all_reduce(x, Operation.DP_ALL_REDUCE).wait()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with self.recorder.span(Operation.BARRIER):
            # reading the result makes the host itself wait, also where the sum runs on a device
            self.sum_over_all(torch.zeros(1, device=self.device)).item()


def create_mesh(
    layout: Layout,
    rank: int,
    device: torch.device,
    recorder: Recorder,
    *,
    has_wrap_links: bool = False,
    timeout_s: float = 300.0,
    before_exchange: Callable[[Exchange], None] | None = None,
) -> Mesh:
    """Create this rank's groups.

    has_wrap_links: a stage has several chunks, so the last stage sends to the first. before_exchange: called with each
    exchange before it starts; for tests, which delay and break some.
    Communication: each group's own rendezvous; no barrier over all ranks.
    Raises: CommunicationError naming the group.
    """
    at = layout.coordinate(rank)
    pp_ranks = layout.pp_ranks(rank)
    is_end = at.pp in (0, layout.pp_size - 1)
    ends = (pp_ranks[0], pp_ranks[-1]) if is_end and layout.pp_size > 1 else (rank,)
    timeout = timedelta(seconds=timeout_s)
    queue = CommunicationQueue(recorder, before_exchange)

    def lane(name: str) -> Lane | None:
        return Lane(name) if device.type == "cpu" else None

    def group(name: str, members: tuple[int, ...], backend: str | None = None, own_lane: Lane | None = None) -> Group:
        number = recorder.add_group(name, members)
        process_group = None
        if len(members) > 1:
            try:
                process_group = dist.new_group(
                    list(members),
                    timeout=timeout,
                    backend=backend,
                    pg_options=nccl_options(name, timeout) if device.type == "cuda" and backend is None else None,
                    use_local_synchronization=True,
                    group_desc=name,
                )
            except RuntimeError as error:
                raise CommunicationError(
                    f"rank {rank} could not create group {name} of ranks {brief(members)} within "
                    f"runtime.init_timeout_s={timeout_s:g}; one of them is missing or stuck: {error}"
                ) from error
        return Group(name, members, members.index(rank), queue, number, process_group, own_lane, timeout=timeout)

    on_host = "gloo" if device.type == "cuda" else None
    return Mesh(
        layout=layout,
        rank=rank,
        coordinate=at,
        device=device,
        recorder=recorder,
        tp=group("tp", layout.tp_ranks(rank)),
        dp=group("dp", layout.dp_ranks(rank), own_lane=lane("dp")),
        pp=group("pp", pp_ranks),
        host=HostGroups(
            tp=group("host-tp", layout.tp_ranks(rank), on_host),
            pp=group("host-pp", pp_ranks, on_host),
            dp=group("host-dp", layout.dp_ranks(rank), on_host),
        ),
        links=_links(at.pp, pp_ranks, recorder, group, lane, has_wrap_links),
        # last: torch names a group by its ranks and by how many groups this rank has already. Middle stages lack this
        # one, so a group made after it would have two names, and its members would wait for each other forever
        embedding=group("embedding", ends),
    )


def _links(
    stage: int,
    pp_ranks: tuple[int, ...],
    recorder: Recorder,
    group: Callable[[str, tuple[int, ...]], Group],
    lane: Callable[[str], Lane | None],
    has_wrap_links: bool,
) -> Links | None:
    if len(pp_ranks) == 1:
        if not has_wrap_links:
            return None
        onward, back = LocalChannel(), LocalChannel()
        return Links(onward, onward, back, back)
    forward = group("pp-forward", pp_ranks)
    backward = group("pp-backward", pp_ranks)
    forward_wrap, backward_wrap = forward, backward
    if has_wrap_links and len(pp_ranks) == 2:
        # two stages are each other's neighbour on both sides: there the wrap link would share a pair with the other
        forward_wrap = group("pp-forward-wrap", pp_ranks)
        backward_wrap = group("pp-backward-wrap", pp_ranks)
    last = len(pp_ranks) - 1

    def channel(direct: Group, wrap: Group, step: int, *, is_sender: bool) -> Channel:
        peer_stage = (stage + step) % len(pp_ranks)
        is_wrap = (stage, step) in ((last, +1), (0, -1))
        peer = pp_ranks[peer_stage]
        here = pp_ranks[stage]
        ends = (here, peer) if is_sender else (peer, here)
        over = wrap if is_wrap else direct
        number = recorder.add_group(over.name, ends)
        return Channel(over, peer, number, lane(f"{over.name}-{'to' if is_sender else 'from'}-{peer}"))

    return Links(
        forward_to_next=channel(forward, forward_wrap, +1, is_sender=True),
        forward_from_previous=channel(forward, forward_wrap, -1, is_sender=False),
        backward_to_previous=channel(backward, backward_wrap, -1, is_sender=True),
        backward_from_next=channel(backward, backward_wrap, +1, is_sender=False),
    )
