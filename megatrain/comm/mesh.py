"""The mesh: this rank's groups along each axis, and its channels to the neighbouring stages.

Which groups there are, and in which order each rank creates its own, is computed (group_plan.py) from the layout's
axes; `host` has the same once more, on CPU memory. The `embedding` group joins the first and last stage of a pipeline,
which both hold a tied embedding; `neighbours` are those who hold the same part where an axis has more ranks than parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from megatrain.comm.channel import Channel
from megatrain.comm.group import Group
from megatrain.comm.group_creation import create_process_group
from megatrain.comm.group_plan import PlannedGroup, planned_groups, summing_order
from megatrain.comm.group_stores import GroupStores
from megatrain.comm.host_groups import HostGroups
from megatrain.comm.link_warmup import warm_up
from megatrain.comm.links import Links, create_links
from megatrain.comm.queue import CommunicationQueue, Exchange, Lane
from megatrain.contracts.layout import DENSE, REPLICAS, Coordinate, Layout, Neighbours
from megatrain.contracts.operations import Operation, all_reduce_along
from megatrain.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place, groups by axis and links. `links` is None where one stage has the whole model as one chunk.

    `stores` is where the groups met; the one that this rank serves, if it does, lasts as long.
    """

    layout: Layout
    rank: int
    coordinate: Coordinate
    device: torch.device
    recorder: Recorder
    along: Mapping[str, Group]
    embedding: Group
    host: HostGroups
    links: Links | None
    stores: GroupStores | None = None
    neighbours: Mapping[str, Group] = field(default_factory=dict)

    @property
    def tp(self) -> Group:
        return self.along["tp"]

    @property
    def dp(self) -> Group:
        return self.along["dp"]

    @property
    def pp(self) -> Group:
        return self.along["pp"]

    @property
    def by_name(self) -> dict[str, Group]:
        """The groups that parameters and gradients are exchanged over."""
        return {**self.along, self.embedding.name: self.embedding, **self.neighbours}

    @property
    def is_last_stage(self) -> bool:
        return self.coordinate["pp"] == self.layout.pp_size - 1

    @property
    def is_alone(self) -> bool:
        return self.layout.world_size == 1

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of this rank, each once."""
        found = [*self.along.values(), self.embedding, *self.neighbours.values(), *self.host.along.values()]
        if self.links is not None:
            channels = (self.links.forward_to_next, self.links.forward_from_previous,
                        self.links.backward_to_previous, self.links.backward_from_next)  # fmt: skip
            for channel in channels:
                if isinstance(channel, Channel) and all(channel.group is not group for group in found):
                    found.append(channel.group)
        return tuple(found)

    def set_timeout(self, seconds: float) -> None:
        """Bound every later exchange on every group."""
        for group in self.groups:
            group.set_timeout(seconds)

    def sum_over_all(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, made axis by axis. In place, blocks.

        Communication: a small all-reduce an axis; no group of all ranks is needed.
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
    stores: GroupStores | None = None,
    has_wrap_links: bool = False,
    neighbours: Sequence[Neighbours] = (),
    has_tp_lane: bool = False,
    timeout_s: float = 300.0,
    before_exchange: Callable[[Exchange], None] | None = None,
) -> Mesh:
    """Create this rank's groups.

    stores: where the groups meet; None: at the store that torch was given for the world.
    has_wrap_links: a stage has several chunks, so the last stage sends to the first. neighbours: of the parts that
    several ranks hold, who holds one together. has_tp_lane: exchanges over tp are awaited later than they are started,
    too. before_exchange: called with each exchange before it starts; for tests, which delay and break some.
    Communication: each group's own rendezvous, one after the other; no barrier over all ranks. On a GPU also the first
    message on every link.
    Raises: CommunicationError naming the group and the ranks that have not come to it.
    """
    queue = CommunicationQueue(recorder, before_exchange)
    groups: dict[str, Group] = {}

    def store_of(planned: PlannedGroup) -> dist.Store:
        return dist.distributed_c10d._get_default_store() if stores is None else stores.of(planned)

    def create(planned: PlannedGroup) -> dist.ProcessGroup:
        return create_process_group(planned, rank, device, store_of(planned), timeout_s=timeout_s)

    def lane(name: str) -> Lane | None:
        return Lane(name) if device.type == "cpu" else None

    with_lanes = (*REPLICAS, "tp") if has_tp_lane else REPLICAS
    all_planned = planned_groups(layout, rank, has_wrap_links=has_wrap_links, neighbours=neighbours)
    for planned in all_planned:
        number = recorder.add_group(planned.name, planned.ranks)
        groups[planned.name] = Group(
            planned.name,
            planned.ranks,
            planned.ranks.index(rank),
            queue,
            number,
            None if len(planned.ranks) == 1 else create(planned),
            lane(planned.name) if planned.name in with_lanes else None,
            timeout=timedelta(seconds=timeout_s),
        )
    coordinate = layout.coordinate(rank)
    links = create_links(coordinate["pp"], groups, recorder, lane, has_wrap_links=has_wrap_links)
    if layout.pp_size > 1 and device.type == "cuda":
        assert links is not None
        meeting = {planned.name: planned for planned in all_planned}
        warm_up(
            links,
            coordinate["pp"],
            layout.pp_size,
            device,
            lambda group: store_of(meeting[group.name]),
            has_wrap_links=has_wrap_links,
        )
    return Mesh(
        layout=layout,
        rank=rank,
        coordinate=coordinate,
        device=device,
        recorder=recorder,
        along={axis: groups[axis] for axis in layout.axes},
        embedding=groups["embedding"],
        host=HostGroups({axis: groups[f"host-{axis}"] for axis in layout.axes}, summing_order(layout)),
        links=links,
        stores=stores,
        neighbours={one.name: groups[one.name] for one in neighbours},
    )
