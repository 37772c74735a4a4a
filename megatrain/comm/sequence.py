"""Differentiable collectives over the tensor-parallel group. The backward of most of them is a collective too.

The first two are each other's backward; the backward of a sum is a sum. The backward of gather_columns needs no
collective, because all ranks compute the same with the result.

    gather_from_sequence      all-gather along the sequence      <->  reduce-scatter
    reduce_scatter_to_sequence  sum over ranks, keep own rows    <->  all-gather
    gather_columns            all-gather along the last dim       ->  keep own columns

Sequence parallel after Korthikanti et al. (arXiv:2205.05198). Shapes: S whole sequence, B micro-batch, H hidden; a
`_local` tensor holds S / tp_size rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import Operation


def all_gather_rows(x_local: Tensor, group: Group) -> Tensor:
    """Return all ranks' rows, without autograd. Blocks."""
    return group.all_gather(x_local.contiguous(), Operation.TP_ALL_GATHER).wait()


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """Return this rank's rows of the sum over ranks, without autograd. Blocks."""
    return group.reduce_scatter(x.contiguous(), Operation.TP_REDUCE_SCATTER).wait()


def gather_from_sequence(x_local: Tensor, group: Group) -> Tensor:
    """Gather the ranks' rows: [S / tp, B, H] -> [S, B, H].

    Communication: blocking all-gather; reduce-scatter in backward.
    """
    return x_local if group.size == 1 else _Gather.apply(x_local, group)


def reduce_scatter_to_sequence(x: Tensor, group: Group) -> Tensor:
    """Sum over ranks and keep this rank's rows: [S, B, H] -> [S / tp, B, H].

    Communication: blocking reduce-scatter; all-gather in backward.
    """
    return x if group.size == 1 else _ReduceScatter.apply(x, group)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum of the ranks' x, on every rank.

    Communication: blocking all-reduce, and again in backward.
    """
    return x if group.size == 1 else _Sum.apply(x, group)


def gather_columns(x_local: Tensor, group: Group) -> Tensor:
    """Gather the ranks' columns: [T, V / tp] -> [T, V], contiguous. All ranks must compute the same with the result.

    Communication: blocking all-gather; none in backward, because every rank has the gradient of all columns.
    """
    return x_local if group.size == 1 else _GatherColumns.apply(x_local, group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce(x.clone(), Operation.TP_ALL_REDUCE).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grad.clone(), Operation.TP_ALL_REDUCE).wait(), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather_rows(x_local, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_rows(grad, ctx.group), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, group: Group) -> Tensor:
        ctx.group = group
        parts = all_gather_rows(x_local, group).view(group.size, *x_local.shape)
        return parts.transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # a copy: a view would keep the gradient of all columns
        return grad.chunk(ctx.group.size, dim=1)[ctx.group.rank].clone(memory_format=torch.contiguous_format), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad_local: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(grad_local, ctx.group), None
