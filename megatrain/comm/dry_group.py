"""A group as planning runs it: its exchanges have their shapes and their memory, and no peers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from megatrain.comm.group import Group
from megatrain.comm.queue import AwaitedLane, DryQueue


@dataclass(slots=True)
class DryGroup(Group):
    """A group whose tensors are on meta and stand for those of another kind of device."""

    planned_for: str = "cuda"

    def device_type(self, x: Tensor) -> str:
        return self.planned_for


def dry_group(group: Group, device_type: str, *, has_lane: bool) -> DryGroup:
    """Return `group` without its peers, as it would be on `device_type`.

    has_lane: its exchanges are awaited later than they are started; on CPUs two of them are under way at a time then.
    """
    nobody = None if group.size == 1 else ProcessGroup(group.rank, group.size)
    lane = AwaitedLane() if has_lane and device_type == "cpu" else None
    queue = DryQueue(group.queue.recorder)
    return DryGroup(group.name, group.ranks, group.rank, queue, group.number, nobody, lane, planned_for=device_type)
