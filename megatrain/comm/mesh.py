"""The mesh: this rank's groups along each axis, and its channels to the neighboring stages.

group_plan.py computes from the layout's axes which groups exist and in which order each rank creates its own.
`cpu_groups` has a second group along each axis, and one of the replicas, over CPU memory. The `embedding` group joins
the first and the last stage of a pipeline, which both hold a tied embedding. If an axis has more ranks than parts, a
group of `holders` joins the ranks that hold the same part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from megatrain.comm import gloo, nccl
from megatrain.comm.channel import PipelineLinks, create_links
from megatrain.comm.communicator import Communicator
from megatrain.comm.cpu_groups import CpuGroups
from megatrain.comm.device_stream import DeviceStreams
from megatrain.comm.exchange import Exchange, ExchangeRunner
from megatrain.comm.group import Group
from megatrain.comm.group_plan import PlannedGroup, planned_groups, summing_order
from megatrain.comm.group_stores import GroupStores
from megatrain.comm.lanes import Lane
from megatrain.comm.link_warmup import warm_up
from megatrain.contracts.black_box.operations import Operation, all_reduce_along
from megatrain.contracts.layout import DENSE, DENSE_REPLICAS, STAGES, Coordinate, Holders, Layout
from megatrain.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's coordinate, groups by axis and links.

    `links` is None if one stage has the whole model as one chunk. `stores` are the stores at which the groups met. A
    store that this rank serves lasts as long as this object.
    """

    layout: Layout
    rank: int
    coordinate: Coordinate
    device: torch.device
    recorder: Recorder
    along: Mapping[str, Group]
    embedding: Group
    cpu_groups: CpuGroups
    links: PipelineLinks | None
    stores: GroupStores | None = None
    holders: Mapping[str, Group] = field(default_factory=dict)
    spans: Mapping[str, Group] = field(default_factory=dict)
    """By name, the groups of ranks that hold the same parameters along several axes."""

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same dense parameters and process other samples or other tokens."""
        return self.by_name[self.layout.group_name(DENSE_REPLICAS)]

    @property
    def contributes_loss(self) -> bool:
        """Whether this rank contributes its loss to sums over all ranks.

        Along an axis that shards the stage, all ranks have the same loss, and only the first contributes.
        """
        cuts_stage = (axis for axis in DENSE if axis not in DENSE_REPLICAS)
        return self.is_last_stage and not any(self.layout.index(axis, self.rank) for axis in cuts_stage)

    @property
    def tp(self) -> Group:
        """The ranks that hold the other shards of the same layers: rows of the sequence travel between them."""
        return self.along["tp"]

    @property
    def by_name(self) -> dict[str, Group]:
        """The groups over which parameters and gradients are exchanged."""
        return {**self.along, **self.spans, self.embedding.name: self.embedding, **self.holders}

    @property
    def stage(self) -> int:
        """The stage of the pipeline that this rank is in."""
        return self.layout.index(STAGES, self.rank)

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.layout.pp_size - 1

    @property
    def is_alone(self) -> bool:
        return self.layout.world_size == 1

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of this rank, without duplicates."""
        found = [
            *self.along.values(),
            *self.spans.values(),
            self.embedding,
            *self.holders.values(),
            *self.cpu_groups.all_groups,
        ]
        if self.links is not None:
            for channel in self.links.channels:
                if all(channel.group is not group for group in found):
                    found.append(channel.group)
        return tuple(found)

    def set_timeout(self, seconds: float) -> None:
        """Limit the time of every later exchange on every group."""
        for group in self.groups:
            group.set_timeout(seconds)

    def sum_over_all(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, axis by axis. In place, blocks.

        Communication: a small all-reduce per axis; no group of all ranks is needed.
        """
        for axis in summing_order(self.layout):
            self.along[axis].all_reduce(x, all_reduce_along(axis)).wait()
        return x

    def reduce_over_stage(self, x: Tensor, *, maximum: bool = False) -> Tensor:
        """Return the sum of `x` over all ranks of this rank's stage, or the maximum. In place, blocks.

        Communication: a small all-reduce over dp, then over each inner axis.
        """
        for axis in DENSE:
            if axis in self.along:
                self.along[axis].all_reduce(x, all_reduce_along(axis), maximum=maximum).wait()
        return x

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        with self.recorder.span(Operation.BARRIER):
            # reading the result makes the host wait even if the sum runs on a device
            self.sum_over_all(torch.zeros(1, device=self.device)).item()


def create_mesh(
    layout: Layout,
    rank: int,
    device: torch.device,
    recorder: Recorder,
    *,
    stores: GroupStores | None = None,
    has_wrap_links: bool = False,
    holders: Sequence[Holders] = (),
    has_sequence_chunks: bool = False,
    timeout_s: float = 300.0,
    before_exchange: Callable[[Exchange], None] | None = None,
) -> Mesh:
    """Create this rank's groups: NCCL's on a GPU, gloo's on CPUs and on host memory.

    stores: the stores at which the groups meet; None means the store of torch's default group.
    has_wrap_links, holders: see build_mesh. has_sequence_chunks: tp ranks exchange sequence chunks, which start
    first and are awaited later. before_exchange: called with each exchange before it starts; tests use it to delay
    exchanges or make them fail.
    Communication: each group's own rendezvous, one after the other; no barrier over all ranks. With NCCL also the first
    message on each link.
    Raises: CommunicationError naming the group and the ranks that have not arrived, or the store or link that could
    not be reached.
    """
    runner, timeout = ExchangeRunner(recorder, before_exchange), timedelta(seconds=timeout_s)
    streams = DeviceStreams()

    def store_of(planned: PlannedGroup) -> dist.Store:
        return dist.distributed_c10d._get_default_store() if stores is None else stores.of(planned)

    def connect(planned: PlannedGroup) -> Communicator:
        store = store_of(planned)
        if device.type == "cuda" and not planned.uses_cpu_memory:
            group = nccl.create_process_group(planned, rank, device, store, timeout)
            return nccl.NcclCommunicator(runner, planned, group, timeout, streams)
        group = gloo.create_process_group(planned, rank, store, timeout)
        new_lane = Lane if planned.is_awaited_later(has_sequence_chunks=has_sequence_chunks) else None
        return gloo.GlooCommunicator(runner, planned, group, timeout, new_lane)

    mesh = build_mesh(layout, rank, device, recorder, connect, has_wrap_links=has_wrap_links, holders=holders)
    if mesh.links is not None and mesh.links.connect_at_first_message:
        warm_up(
            mesh.links,
            mesh.stage,
            layout.pp_size,
            device,
            lambda group: store_of(PlannedGroup(group.name, group.ranks)),
            has_wrap_links=has_wrap_links,
        )
    return replace(mesh, stores=stores)


def build_mesh(
    layout: Layout,
    rank: int,
    device: torch.device,
    recorder: Recorder,
    connect: Callable[[PlannedGroup], Communicator],
    *,
    has_wrap_links: bool,
    holders: Sequence[Holders],
) -> Mesh:
    """Return this rank's mesh. `connect` creates its groups one after the other, in the order of group_plan.py.

    has_wrap_links: a stage has several chunks, so the last stage sends to the first. holders: the axes along which
    several ranks hold the same part, with the number of parts.
    """
    groups: dict[str, Group] = {}
    for planned in planned_groups(layout, rank, has_wrap_links=has_wrap_links, holders=holders):
        ranks = planned.ranks
        number = recorder.add_group(planned.name, ranks)
        communicator = connect(planned) if len(ranks) > 1 else None
        groups[planned.name] = Group(planned.name, ranks, ranks.index(rank), number, communicator)
    return Mesh(
        layout=layout,
        rank=rank,
        coordinate=layout.coordinate(rank),
        device=device,
        recorder=recorder,
        along={axis: groups[axis] for axis in layout.axes},
        embedding=groups["embedding"],
        cpu_groups=CpuGroups(
            {axis: groups[f"host-{axis}"] for axis in layout.axes},
            summing_order(layout),
            groups[f"host-{layout.group_name(DENSE_REPLICAS)}"],
        ),
        links=create_links(layout.index(STAGES, rank), groups, recorder, has_wrap_links=has_wrap_links),
        holders={holder.name: groups[holder.name] for holder in holders},
        spans={name: groups[name] for name in map(layout.group_name, layout.replica_spans)},
    )
