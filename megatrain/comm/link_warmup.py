"""The first message on every link, sent before training, in an order that cannot deadlock.

On a GPU two stages connect at their first message, and each blocks its host until the other has come. In training that
would happen in the middle of the first step, in the order of the schedule, where a receive is posted before the sends
that its sender waits to be rid of. So each pair connects here. Links are one after another in one order for the whole
pipeline, neighbours of even stages first, then those of odd ones: so most of them connect side by side. Both ends meet
at the store before each, since NCCL itself would wait for the other without end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist

from megatrain.comm.channel import Channel
from megatrain.comm.group import Group
from megatrain.comm.links import Links
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.operations import Operation

Call = tuple[str, bool]
"""Name of one of Links' channels, and whether this stage sends on it."""
_OPERATIONS = {
    "forward": (Operation.FORWARD_SEND, Operation.FORWARD_RECV),
    "backward": (Operation.BACKWARD_SEND, Operation.BACKWARD_RECV),
}


def warm_up_order(stage: int, num_stages: int, *, has_wrap_links: bool) -> list[Call]:
    """Return what a stage does, in the order of the whole pipeline's links."""
    last = num_stages - 1
    edges = [(source, source + 1) for parity in (0, 1) for source in range(parity, last, 2)]
    edges += [(last, 0)] if has_wrap_links else []
    found = []
    for source, target in edges:
        found += [("forward_to_next", True)] if stage == source else []
        found += [("forward_from_previous", False)] if stage == target else []
    for target, source in edges:
        found += [("backward_to_previous", True)] if stage == source else []
        found += [("backward_from_next", False)] if stage == target else []
    return found


def warm_up(
    links: Links,
    stage: int,
    num_stages: int,
    device: torch.device,
    store_of: Callable[[Group], dist.Store],
    *,
    has_wrap_links: bool,
) -> None:
    """Send one number on every link of this stage, and receive one.

    store_of: where the members of a link's group met. Every group's timeout bounds its first messages.
    Communication: one element on every link; at the store one key written and one request for each.
    Raises: CommunicationError naming the link and the neighbour.
    """
    for name, is_send in warm_up_order(stage, num_stages, has_wrap_links=has_wrap_links):
        channel = getattr(links, name)
        assert isinstance(channel, Channel), "several stages hand nothing over in memory"
        _await_other_end(channel, is_send, store_of(channel.group))
        sends, receives = _OPERATIONS[name.partition("_")[0]]
        if is_send:
            channel.send(torch.zeros(1, device=device), sends, chunk=-1, microbatch=-1).wait()
        else:
            channel.receive((1,), torch.float32, device, receives, chunk=-1, microbatch=-1).wait()


def _await_other_end(channel: Channel, is_send: bool, store: dist.Store) -> None:
    group = channel.group
    here = group.ranks[group.rank]
    ends = (here, channel.peer) if is_send else (channel.peer, here)
    place = f"{group.name}-{group.ranks[0]}/first-message/{ends[0]}-{ends[1]}"
    store.set(f"{place}/{here}", b"1")
    try:
        store.wait([f"{place}/{channel.peer}"], group.timeout)
    except RuntimeError as error:
        side = "to" if is_send else "from"
        raise CommunicationError(
            f"rank {here} could not begin the link {group.name} {side} rank {channel.peer} within "
            f"runtime.init_timeout_s={group.timeout.total_seconds():g}: rank {channel.peer} has not come to it: {error}"
        ) from error
