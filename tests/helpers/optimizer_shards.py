"""Flat shards of an optimizer for tests of its operators: weights, moments, and the beginnings of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatrain.ops.optimizer_step import adamw_, lamb_apply_, lamb_direction_
from tests.helpers.kernels import draw, on_device

OPS = torch.ops.megatrain
BETAS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
# Lengths of the runs, the last one padding. Single elements; borders within packs; runs outside the shard, at either
# end and between; one run over many tiles; many runs in one tile; full packs and none.
LAYOUTS: dict[str, list[int]] = {
    "one": [1, 0],
    "seven": [7, 0],
    "123": [0, 100, 3, 0, 15, 5],
    "8191": [8190, 1, 0],
    "long": [20480, 0],
    "packs": [0, 8192, 4096, 128, 0, 0, 8188, 4, 9000, 1, 1, 2, 900, 46],
    "short": [*(1 + number % 5 for number in range(300)), 33],
}


@dataclass
class Shard:
    """The input of an update, with every other run decayed."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    run_borders: Tensor
    is_decayed: Tensor
    published: Tensor | None = None

    @property
    def runs(self) -> list[slice]:
        borders = self.run_borders.tolist()
        return [slice(start, stop) for start, stop in pairwise(borders)]

    @property
    def tensors(self) -> list[Tensor]:
        return [one for one in (self.master, self.exp_avg, self.exp_avg_sq, self.published) if one is not None]

    def copy(self) -> Shard:
        published = None if self.published is None else self.published.clone()
        state = (one.clone() for one in (self.master, self.exp_avg, self.exp_avg_sq))
        return Shard(*state, self.run_borders, self.is_decayed, published)

    def part(self, start: int, stop: int) -> Shard:
        borders = (self.run_borders.clamp(start, stop) - start).contiguous()
        flat = [tensor[start:stop] for tensor in self.tensors]
        return Shard(*flat[:3], borders, self.is_decayed, *flat[3:])

    def adamw(self, grad: Tensor, **changes: Any) -> None:
        settings = BETAS | {"lr": 0.1, "weight_decay": 0.1, "num_updates": 3, "gradient_scale": 0.7} | changes
        adamw_(
            grad,
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
            self.published,
            self.run_borders,
            self.is_decayed,
            **settings,
        )

    def lamb_direction(self, grad: Tensor, **changes: Any) -> Tensor:
        settings = BETAS | {"weight_decay": 0.1, "num_updates": 3, "gradient_scale": 0.7} | changes
        return lamb_direction_(
            grad, self.master, self.exp_avg, self.exp_avg_sq, self.run_borders, self.is_decayed, **settings
        )


def make_shard(lengths: Sequence[int], dtype: torch.dtype = torch.float64, *, is_published: bool = False) -> Shard:
    """Return a shard in the middle of training. Padding has random values too: no kernel may treat it as a decayed
    run."""
    master, exp_avg, spread = (draw(sum(lengths), dtype=dtype, seed=seed) for seed in range(3))
    borders = torch.tensor([0, *accumulate(lengths[:-1])])
    is_decayed = torch.arange(len(lengths) - 1) % 2 == 0
    published = torch.full_like(master, 9.0, dtype=torch.bfloat16) if is_published else None
    return Shard(master, exp_avg, spread.square(), on_device(borders), on_device(is_decayed), published)


def start_shard(lengths: Sequence[int], dtype: torch.dtype) -> Shard:
    shard = make_shard(lengths, dtype)
    shard.exp_avg.zero_()
    shard.exp_avg_sq.zero_()
    return shard


def decay_of_elements(shard: Shard) -> Tensor:
    """Return 1 where an element is decayed, in fp64."""
    mask = torch.zeros_like(shard.master, dtype=torch.float64)
    for run, decays in zip(shard.runs, shard.is_decayed.tolist(), strict=True):
        mask[run] = float(decays)
    return mask


def lamb_update(shard: Shard, grad: Tensor) -> None:
    shard.lamb_direction(grad)
    ratios = draw(shard.is_decayed.numel(), seed=9).exp()
    lamb_apply_(grad, shard.master, shard.published, shard.run_borders, ratios, lr=0.05)
