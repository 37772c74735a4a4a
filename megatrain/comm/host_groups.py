"""Groups on host memory along the mesh's axes: for what ranks tell each other beside training.

Plans travel as JSON, agreements as small integers, shards of a checkpoint as bytes. These groups are gloo's, also where
the mesh's are NCCL's: a checkpoint neither queues behind training's collectives nor needs device memory. No group joins
all ranks, which at 10,000 would be a mesh of connections; an exchange with all goes along one axis after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.comm.group import Group
from megatrain.contracts.operations import Operation

_EXCHANGE = Operation.CHECKPOINT_EXCHANGE


@dataclass(frozen=True, slots=True)
class HostGroups:
    """This rank's groups by axis. Tensors are on the CPU. Each call blocks and takes all ranks of the groups it uses.

    order: the axes along which a word reaches all ranks, one after the other: those of sums.
    """

    along: Mapping[str, Group]
    order: Sequence[str]

    @property
    def groups(self) -> tuple[Group, ...]:
        """Those along which a word reaches all ranks, in that order."""
        return tuple(self.along[axis] for axis in self.order)

    @property
    def dp(self) -> Group:
        return self.along["dp"]

    @property
    def num_calls(self) -> int:
        """How many exchanges this rank has taken part in."""
        return sum(group.num_calls for group in self.along.values())

    def gather_json(self, rank: int, value: Any) -> list[Any] | None:
        """Return every rank's `value` in rank order at rank 0, None at the others. `rank` is the caller's global one.

        Communication: two gathers an axis, each at the first rank of its group.
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

        Communication: as `broadcast_bytes`.
        """
        return json.loads(self.broadcast_bytes(json.dumps(value, separators=(",", ":")).encode()))

    def broadcast_bytes(self, raw: bytes = b"") -> bytes:
        """Return rank 0's `raw` on every rank.

        Communication: two broadcasts an axis, of the length and of the content.
        """
        size = torch.tensor([len(raw)])
        # rank 0 is the first along one axis, the members of that group are the first along the next one, and so on
        for group in reversed(self.groups):
            group.broadcast(size, _EXCHANGE, source=0).wait()
        if int(size.item()) == 0:
            return b""
        content = _padded(raw[: int(size.item())], int(size.item()))
        for group in reversed(self.groups):
            group.broadcast(content, _EXCHANGE, source=0).wait()
        return content.numpy().tobytes()

    def agree(self, rank: int, problem: str | None) -> str | None:
        """Return the first rank's problem on every rank, None where none has one. `rank` is the caller's global one.

        Communication: one small all-reduce an axis; more where there is a problem.
        """
        if self.all_agree(problem is None):
            return None
        problems = self.gather_json(rank, problem)
        first: str | None = self.broadcast_json(next(filter(None, problems)) if problems else None)
        return first

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the smallest of all ranks' values, one by one.

        Communication: a small all-reduce an axis.
        """
        negated = -torch.tensor(values, dtype=torch.int64)
        for group in self.groups:
            group.all_reduce(negated, _EXCHANGE, maximum=True).wait()
        smallest: list[int] = (-negated).tolist()
        return smallest

    def all_agree(self, is_ok: bool) -> bool:
        """Return whether every rank says yes."""
        return bool(self.minimum([int(is_ok)])[0])

    def all_gather(self, axes: Sequence[str], numbers: Tensor, operation: Operation) -> list[tuple[int, ...]]:
        """Return the numbers of every rank that differs from this one along `axes` alone, in their order.

        That is the order of `Layout.ranks_along(rank, *axes)`. Shapes: numbers [count], int64.
        Communication: one all-gather an axis, the last axis first.
        """
        count = len(numbers)
        for axis in reversed(axes):
            numbers = self.along[axis].all_gather(numbers, operation).wait()
        return [tuple(row) for row in numbers.view(-1, count).tolist()]

    def set_timeout(self, seconds: float) -> None:
        """Bound every later exchange."""
        for group in self.along.values():
            group.set_timeout(seconds)


def gather_json_in(group: Group, value: Any) -> list[Any]:
    """Return every member's `value` in group order, on every member.

    Communication: two all-gathers, the second of the longest text.
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
