"""The first message on every link, sent before training, in an order that cannot deadlock.

With NCCL two stages connect at their first message, and each blocks its host thread until the other has arrived. In the
first step this could deadlock: the schedule posts a receive early, while the sending stage still has to complete other
sends. So each pair connects here. All stages use one order of links for the whole pipeline, links from even stages
first, then links from odd stages, so most pairs connect in parallel. Both ranks of a link meet at the store before each
message, because NCCL itself would wait for the peer forever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist

from megatrain.comm.channel import Channel, PipelineLinks
from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import CommunicationError

Call = tuple[str, bool]
"""Name of one of PipelineLinks' channels, and whether this stage sends on it."""
_OPERATIONS = {
    "forward": (Operation.FORWARD_SEND, Operation.FORWARD_RECV),
    "backward": (Operation.BACKWARD_SEND, Operation.BACKWARD_RECV),
}


def warm_up_order(stage: int, num_stages: int, *, has_wrap_links: bool) -> list[Call]:
    """Return the sends and receives of a stage, in the order of the whole pipeline's links."""
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
    links: PipelineLinks,
    stage: int,
    num_stages: int,
    device: torch.device,
    store_of: Callable[[Group], dist.Store],
    *,
    has_wrap_links: bool,
) -> None:
    """Send or receive one number on every link of this stage.

    store_of: the store at which the members of a link's group met. Each group's timeout applies to its first messages.
    Communication: one element per link; at the store, one key written and one request per link.
    Raises: CommunicationError naming the link and the neighbor.
    """
    for name, is_send in warm_up_order(stage, num_stages, has_wrap_links=has_wrap_links):
        channel = getattr(links, name)
        assert isinstance(channel, Channel), "only a pipeline of one stage has in-memory channels"
        _await_other_end(channel, is_send, store_of(channel.group))
        sends, receives = _OPERATIONS[name.partition("_")[0]]
        if is_send:
            channel.send(torch.zeros(1, device=device), sends, chunk=-1, microbatch=-1).wait()
        else:
            channel.receive((1,), torch.float32, device, receives, chunk=-1, microbatch=-1).wait()


def _await_other_end(channel: Channel, is_send: bool, store: dist.Store) -> None:
    group, communicator = channel.group, channel.group.communicator
    assert communicator is not None, "a link has two ends"
    here, timeout = group.ranks[group.rank], communicator.timeout
    ends = (here, channel.peer) if is_send else (channel.peer, here)
    key = f"{group.name}-{group.ranks[0]}/first-message/{ends[0]}-{ends[1]}"
    store.set(f"{key}/{here}", "1")
    try:
        store.wait([f"{key}/{channel.peer}"], timeout)
    except RuntimeError as error:
        side = "to" if is_send else "from"
        raise CommunicationError(
            f"rank {here} could not open the link {group.name} {side} rank {channel.peer} within "
            f"runtime.init_timeout_s={timeout.total_seconds():g}: rank {channel.peer} has not joined it: {error}"
        ) from error
