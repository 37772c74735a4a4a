"""The channels of a pipeline stage: which group each runs over, and who is at its other end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatrain.comm.channel import Channel, LocalChannel
from megatrain.comm.group import Group
from megatrain.comm.queue import Lane
from megatrain.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Links:
    """The channels of one stage. Activations go to the next stage, and from the last to the first (next chunk)."""

    forward_to_next: Channel | LocalChannel
    forward_from_previous: Channel | LocalChannel
    backward_to_previous: Channel | LocalChannel
    backward_from_next: Channel | LocalChannel


def create_links(
    stage: int,
    groups: Mapping[str, Group],
    recorder: Recorder,
    lane: Callable[[str], Lane | None],
    *,
    has_wrap_links: bool,
) -> Links | None:
    """Return the channels of a stage. groups: this rank's, by name; lane: makes one of a name, where there are any."""
    pp_ranks = groups["pp"].ranks
    if len(pp_ranks) == 1:
        if not has_wrap_links:
            return None
        onward, back = LocalChannel(), LocalChannel()
        return Links(onward, onward, back, back)
    forward, backward = groups["pp-forward"], groups["pp-backward"]
    forward_wrap = groups.get("pp-forward-wrap", forward)
    backward_wrap = groups.get("pp-backward-wrap", backward)
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
