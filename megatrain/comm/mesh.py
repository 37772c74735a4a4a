"""The 3D mesh: this rank's groups along each axis, and its channels to the neighbouring stages.

Groups are created by their members alone, each rank going through the same kinds in the same order; every kind
partitions the ranks that take part in it, so no creation waits for an unrelated one (MegaScale sec. 3.5).
Axes: tp, dp, pp. The `embedding` group joins the first and last stage of a pipeline, which both hold a tied embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed as dist

from megatrain.comm.channel import Channel
from megatrain.comm.group import Group
from megatrain.contracts.layout import Coordinate, Layout
from megatrain.telemetry import Recorder


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place and groups."""

    layout: Layout
    rank: int
    coordinate: Coordinate
    tp: Group
    dp: Group
    pp: Group
    embedding: Group
    forward: Group
    backward: Group
    forward_wrap: Group
    backward_wrap: Group

    @property
    def groups(self) -> tuple[Group, ...]:
        return (
            self.tp, self.dp, self.pp, self.embedding,
            self.forward, self.backward, self.forward_wrap, self.backward_wrap,
        )  # fmt: skip

    @property
    def is_first_stage(self) -> bool:
        return self.coordinate.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinate.pp == self.layout.pp_size - 1

    def forward_to_next(self) -> Channel:
        """The link that carries activations away: to the next stage, or from the last to the first (next chunk)."""
        return self._link(+1, self.forward_wrap if self.is_last_stage else self.forward)

    def forward_from_previous(self) -> Channel:
        return self._link(-1, self.forward_wrap if self.is_first_stage else self.forward)

    def backward_to_previous(self) -> Channel:
        return self._link(-1, self.backward_wrap if self.is_first_stage else self.backward)

    def backward_from_next(self) -> Channel:
        return self._link(+1, self.backward_wrap if self.is_last_stage else self.backward)

    def set_timeout(self, seconds: float) -> None:
        """Bound every later exchange on every group."""
        for group in self.groups:
            group.set_timeout(seconds)

    def _link(self, step: int, group: Group) -> Channel:
        pp_ranks = self.pp.ranks
        return Channel(group, pp_ranks[(self.coordinate.pp + step) % len(pp_ranks)])


def create_mesh(
    layout: Layout, rank: int, recorder: Recorder, *, has_wrap_links: bool = False, timeout_s: float = 300.0
) -> Mesh:
    """Create this rank's groups.

    has_wrap_links: the pipeline is interleaved, so the last stage sends to the first.
    Communication: each group's own rendezvous; no barrier over all ranks.
    """
    at = layout.coordinate(rank)
    pp_ranks = layout.pp_ranks(rank)
    is_end = at.pp in (0, layout.pp_size - 1)
    ends = (pp_ranks[0], pp_ranks[-1]) if is_end and layout.pp_size > 1 else (rank,)
    # two stages are each other's neighbour on both sides: only there would the wrap link share a pair with the other
    wraps = pp_ranks if has_wrap_links and layout.pp_size == 2 else None
    timeout = timedelta(seconds=timeout_s)
    numbers = iter(range(1, 1000))

    def group(name: str, ranks: Sequence[int]) -> Group:
        members = tuple(ranks)
        number = next(numbers)
        recorder.name_group(number, name)
        process_group = None
        if len(members) > 1:
            process_group = dist.new_group(
                list(members), timeout=timeout, use_local_synchronization=True, group_desc=name
            )
        return Group(name, members, members.index(rank), recorder, number, process_group)

    tp = group("tp", layout.tp_ranks(rank))
    dp = group("dp", layout.dp_ranks(rank))
    pp = group("pp", pp_ranks)
    forward = group("pp-forward", pp_ranks)
    backward = group("pp-backward", pp_ranks)
    return Mesh(
        layout=layout,
        rank=rank,
        coordinate=at,
        tp=tp,
        dp=dp,
        pp=pp,
        embedding=group("embedding", ends),
        forward=forward,
        backward=backward,
        forward_wrap=group("pp-forward-wrap", wraps) if wraps else forward,
        backward_wrap=group("pp-backward-wrap", wraps) if wraps else backward,
    )
