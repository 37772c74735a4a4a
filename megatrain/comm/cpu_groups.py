"""gloo groups over CPU memory, along the mesh's axes, for exchanges that run in parallel with training.

Plans are sent as JSON, agreements as small integers, shards of a checkpoint as bytes. These groups use gloo even if the
mesh's groups use NCCL. So a checkpoint needs no device memory and does not wait behind the collectives of training. No
group has all ranks: 10,000 ranks would need a connection for each pair. An exchange with all ranks goes axis by axis.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import Operation

_EXCHANGE = Operation.CHECKPOINT_EXCHANGE


@dataclass(frozen=True, slots=True)
class CpuGroups:
    """This rank's groups by axis. Tensors are on the CPU. Each method blocks, and all ranks of the groups that it uses
    must call it.

    order: the axes that an exchange with all ranks uses one after the other (`summing_order`). replicas: the group of
    the ranks that hold the same dense parameters; if these ranks lie along one axis, it is the group of that axis.
    """

    along: Mapping[str, Group]
    order: Sequence[str]
    replicas: Group

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the axes of `order`, in that order."""
        return tuple(self.along[axis] for axis in self.order)

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """All groups, without duplicates."""
        along = tuple(self.along.values())
        return along if any(group is self.replicas for group in along) else (*along, self.replicas)

    @property
    def num_calls(self) -> int:
        """The number of exchanges in which this rank has taken part."""
        return sum(group.num_calls for group in self.all_groups)

    def gather_json(self, rank: int, value: Any) -> list[Any] | None:
        """Return every rank's `value` in rank order at rank 0, None at the others. `rank` is the caller's global
        rank.

        Communication: per axis, an all-gather of the sizes and a gather to the first rank of the group.
        """
        text = json.dumps({str(rank): value}, separators=(",", ":"))[1:-1].encode()
        for group in self.groups:
            parts = _gather_bytes(group, text)
            if parts is None:
                return None
            text = b",".join(parts)
        by_rank = json.loads(b"{" + text + b"}")
        return [by_rank[key] for key in sorted(by_rank, key=int)]

    def broadcast_json(self, value: Any = None) -> Any:
        """Return rank 0's `value` on every rank.

        Communication: the same as for `broadcast_bytes`.
        """
        return json.loads(self.broadcast_bytes(json.dumps(value, separators=(",", ":")).encode()))

    def broadcast_bytes(self, raw: bytes = b"") -> bytes:
        """Return rank 0's `raw` on every rank.

        Communication: two broadcasts per axis, of the length and of the content.
        """
        size = torch.tensor([len(raw)])
        # rank 0 is the first rank along one axis, the members of that group are the first along the next, and so on
        for group in reversed(self.groups):
            group.broadcast(size, _EXCHANGE, source=0).wait()
        if int(size.item()) == 0:
            return b""
        content = _padded(raw[: int(size.item())], int(size.item()))
        for group in reversed(self.groups):
            group.broadcast(content, _EXCHANGE, source=0).wait()
        return content.numpy().tobytes()

    def agree(self, rank: int, problem: str | None) -> str | None:
        """Return, on every rank, the problem of the lowest rank that has one; None if no rank has one. `rank` is the
        caller's global rank.

        Communication: one small all-reduce per axis; more if a rank has a problem.
        """
        if self.all_agree(problem is None):
            return None
        problems = self.gather_json(rank, problem)
        first: str | None = self.broadcast_json(next(filter(None, problems)) if problems else None)
        return first

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise minimum of all ranks' values.

        Communication: a small all-reduce per axis.
        """
        negated = -torch.tensor(values, dtype=torch.int64)
        for group in self.groups:
            group.all_reduce(negated, _EXCHANGE, maximum=True).wait()
        smallest: list[int] = (-negated).tolist()
        return smallest

    def all_agree(self, is_ok: bool) -> bool:
        """Return whether `is_ok` holds on every rank."""
        return bool(self.minimum([int(is_ok)])[0])

    def all_gather(self, axes: Sequence[str], numbers: Tensor, operation: Operation) -> list[tuple[int, ...]]:
        """Return the numbers of this rank and of every rank that differs from it only along `axes`.

        The order is that of `Layout.ranks_along(rank, *axes)`. Shapes: numbers [count], int64.
        Communication: one all-gather per axis, the last axis first.
        """
        count = len(numbers)
        for axis in reversed(axes):
            numbers = self.along[axis].all_gather(numbers, operation).wait()
        return [tuple(row) for row in numbers.view(-1, count).tolist()]

    def set_timeout(self, seconds: float) -> None:
        """Limit the time of every later exchange."""
        for group in self.all_groups:
            group.set_timeout(seconds)


def gather_json_in(group: Group, value: Any) -> list[Any]:
    """Return every member's `value` in group order, on every member.

    Communication: two all-gathers: the sizes, then the texts, each padded to the longest one.
    """
    raw = json.dumps(value, separators=(",", ":")).encode()
    sizes = group.all_gather(torch.tensor([len(raw)]), _EXCHANGE).wait().tolist()
    padded = group.all_gather(_padded(raw, max(sizes)), _EXCHANGE).wait()
    rows = padded.view(group.size, -1)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _gather_bytes(group: Group, raw: bytes) -> list[bytes] | None:
    sizes = group.all_gather(torch.tensor([len(raw)]), _EXCHANGE).wait().tolist()
    parts = group.gather(_padded(raw, max(sizes)), _EXCHANGE)
    if parts is None:
        return None
    return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def _padded(raw: bytes, size: int) -> Tensor:
    padded = torch.zeros(size, dtype=torch.uint8)
    if raw:
        padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return padded
