"""Residual branches in which GEMMs overlap with collectives, chunk by chunk, in forward and in backward.

compute                                              | collective that overlaps with it
forward    first GEMMs of chunk k                    | all-gather of the chunks after k
           last GEMMs of chunk k                     | reduce-scatter of the chunks before k
backward   dgrad of the last GEMMs, chunk k          | all-gather of the gradient's chunks after k
           their wgrads, and the middle's backward   | second all-gather of the branch's input
           dgrad of the first GEMMs, chunk k         | reduce-scatter of the chunks before k
           their wgrads                              | the remaining reduce-scatters

Between the two collectives, rows are in chunk order (comm/sequence_chunks.py). Attention needs the order of the
sequence, so it gets a copy of the QKV projection's output in that order. A wgrad is one GEMM over all rows, not a sum
over chunks, so its addends do not depend on the number of chunks.
Shapes: S sequence, B micro-batch, H hidden, I inputs and O outputs of a GEMM; a `_local` tensor holds S / tp rows.
Source: MegaScale sec. 3.2; Korthikanti et al. (2205.05198) for gathering the branch's input again in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatrain.comm.sequence_chunks import (
    RowGathering,
    RowScattering,
    SequenceChunks,
    in_chunk_order,
    in_sequence_order,
)
from megatrain.ops.linear import weight_gradient
from megatrain.ops.main_grad import main_grad_of
from megatrain.parallel.recompute import SelectiveRecompute


class ChunkedSublayers(nn.Module):
    """Replaces a branch's Sublayers under sequence parallelism: [S / tp, B, H] -> [S / tp, B, H].

    keeps_rows: whether the gathered rows are kept for backward instead of gathered again. This is for full recompute,
    where backward runs the block's forward again anyway.
    """

    def __init__(self, chunks: SequenceChunks, selective_recompute: SelectiveRecompute, *, keeps_rows: bool) -> None:
        super().__init__()
        self.chunks = chunks
        self.selective_recompute = selective_recompute
        self.keeps_rows = keeps_rows

    def forward(
        self, normed_local: Tensor, attention: Any | None, mlp: Any | None, pattern: Any, positions: Any
    ) -> Tensor:
        branch = _BranchContext(self.chunks, self.keeps_rows)
        first, last = [], []
        if attention is not None:
            first.append((attention.qkv.weight, attention.qkv.bias))
            last.append(attention.out.weight)
        if mlp is not None:
            first.append((mlp.up.weight, None))  # the activation adds its bias
            last.append(mlp.down.weight)
        products = list(gather_and_multiply(normed_local, first, branch))
        inputs = []
        if attention is not None:
            product = in_sequence_order(products.pop(0), self.chunks)
            inputs.append(self._in_chunk_order(attention.attend(product, pattern, positions)))
            del product
        if mlp is not None:
            inputs.append(mlp.activate(products.pop(0)))
        return multiply_and_scatter(inputs, last, normed_local, branch)

    def _in_chunk_order(self, attended: Tensor) -> Tensor:
        """Return a copy in chunk order. Backward makes it again from `attended`, which attention keeps anyway."""
        reorder = partial(in_chunk_order, chunks=self.chunks)
        rows = reorder(attended)
        self.selective_recompute.register(rows, attended, reorder)
        return rows


class _BranchContext:
    """The state that the two functions of one forward through a residual branch share.

    The backward of the last GEMMs starts the second gather, and the backward of the first GEMMs takes its rows.
    """

    def __init__(self, chunks: SequenceChunks, keeps_rows: bool) -> None:
        self.chunks = chunks
        self.keeps_rows = keeps_rows
        self._gathering: RowGathering | None = None

    def start_gathering_again(self, x_local: Tensor) -> None:
        self._gathering = RowGathering(x_local, self.chunks)

    def take_rows(self) -> Tensor:
        assert self._gathering is not None
        gathering, self._gathering = self._gathering, None
        return gathering.wait()


def gather_and_multiply(
    x_local: Tensor, factors: Sequence[tuple[Tensor, Tensor | None]], branch: _BranchContext
) -> tuple[Tensor, ...]:
    """Return the product of the gathered rows and each (weight, bias), in chunk order.

    Shapes: x [S / tp, B, I]; weight [*O, I]; bias [*O]; result [S, B, *O].
    Communication: K all-gathers during the GEMMs; K reduce-scatters in backward.
    """
    flat = [tensor for factor in factors for tensor in factor]
    products = _GatherAndMultiply.apply(x_local, branch, *flat)
    return tuple(
        product.unflatten(-1, weight.shape[:-1]) for product, (weight, _) in zip(products, factors, strict=True)
    )


def multiply_and_scatter(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], x_local: Tensor, branch: _BranchContext
) -> Tensor:
    """Multiply each input by its weight, sum over products and ranks, and return this rank's rows of the sum.

    inputs: rows in chunk order. x_local: the rows that gather_and_multiply got; backward gathers them again.
    Shapes: inputs [S, B, I]; weights [O, I]; result [S / tp, B, O].
    Communication: K reduce-scatters during the GEMMs; in backward K all-gathers, and K more of x_local.
    """
    again = [] if branch.keeps_rows else [x_local.detach()]
    first = _SaveForBackward.apply(*inputs, *weights, *again)
    return _MultiplyAndScatter.apply(first.grad_fn, branch, first, *inputs[1:], *weights)


class _GatherAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, branch: _BranchContext, *flat: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = cast("tuple[Tensor, ...]", flat[::2]), flat[1::2]
        matrices = [weight.flatten(0, -2) for weight in weights]
        gathering = RowGathering(x_local, branch.chunks)
        products = [x_local.new_empty(*gathering.rows.shape[:-1], len(matrix)) for matrix in matrices]
        for rows, *outs in zip(gathering.gathered_chunks(), *_cut(products, branch), strict=True):
            for out, matrix, bias in zip(outs, matrices, biases, strict=True):
                _multiply(rows, matrix, bias, out)
        ctx.branch = branch
        ctx.main_grads = [main_grad_of(weight) for weight in weights]
        ctx.bias_shapes = [None if bias is None else bias.shape for bias in biases]
        ctx.save_for_backward(*weights, *([gathering.rows] if branch.keeps_rows else []))
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        branch, saved = ctx.branch, ctx.saved_tensors
        weights, kept = saved[: len(grads)], saved[len(grads) :]
        grads = tuple(grad.contiguous() for grad in grads)
        matrices = [weight.flatten(0, -2) for weight in weights]
        scattering = RowScattering(branch.chunks)
        for gathered in zip(*_cut(grads, branch), strict=True):
            scattering.start(_sum_of_products(gathered, matrices))
        rows = kept[0] if kept else branch.take_rows()
        found: list[Tensor | None] = []
        for number, grad in enumerate(grads):
            needs_weight, needs_bias = ctx.needs_input_grad[2 + 2 * number : 4 + 2 * number]
            weight, main_grad, shape = weights[number], ctx.main_grads[number], ctx.bias_shapes[number]
            found.append(weight_gradient(grad, rows, weight, main_grad) if needs_weight else None)
            found.append(grad.flatten(0, -2).sum(0).view(shape) if needs_bias else None)
        return scattering.wait(), None, *found


class _SaveForBackward(torch.autograd.Function):
    """Saves the tensors that the backward of the next function needs, and returns the first of them.

    When backward recomputes a block, torch stops the recomputation at the last tensor that the block saves. This
    function saves before the reduce-scatters, so they are not run again.
    """

    @staticmethod
    def forward(ctx: Any, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return saved[0].view_as(saved[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class _MultiplyAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, saver: Any, branch: _BranchContext, *flat: Tensor) -> Tensor:
        inputs, weights = flat[: len(flat) // 2], flat[len(flat) // 2 :]
        matrices = [weight.t() for weight in weights]
        scattering = RowScattering(branch.chunks)
        for gathered in zip(*_cut(inputs, branch), strict=True):
            scattering.start(_sum_of_products(gathered, matrices))
        ctx.saver = saver
        ctx.branch = branch
        ctx.main_grads = [main_grad_of(weight) for weight in weights]
        return scattering.wait()

    @staticmethod
    def backward(ctx: Any, grad_local: Tensor) -> tuple[Tensor | None, ...]:
        branch, saved, num_products = ctx.branch, ctx.saver.saved_tensors, len(ctx.main_grads)
        inputs, weights, again = saved[:num_products], saved[num_products : 2 * num_products], saved[2 * num_products :]
        grads = [torch.empty_like(x) for x in inputs]
        gathering = RowGathering(grad_local, branch.chunks)
        if again:  # started after the gradient's gather, because the gradient is needed first
            branch.start_gathering_again(*again)
        for rows, *outs in zip(gathering.gathered_chunks(), *_cut(grads, branch), strict=True):
            for out, weight in zip(outs, weights, strict=True):
                _multiply(rows, weight.t(), None, out)
        found = [
            weight_gradient(gathering.rows, x, weight, main_grad) if needs_weight else None
            for x, weight, main_grad, needs_weight in zip(
                inputs, weights, ctx.main_grads, ctx.needs_input_grad[2 + num_products :], strict=True
            )
        ]
        return None, None, *grads, *found


def _cut(tensors: Iterable[Tensor], branch: _BranchContext) -> list[tuple[Tensor, ...]]:
    """Return the gathered chunks of each tensor."""
    return [x.chunk(branch.chunks.num_chunks) for x in tensors]


def _multiply(rows: Tensor, weight_OI: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write rows weight' + bias to `out`, which must be contiguous."""
    x, y = rows.flatten(0, -2), out.flatten(0, -2)
    if bias is None:
        torch.mm(x, weight_OI.t(), out=y)
    else:
        torch.addmm(bias.flatten(), x, weight_OI.t(), out=y)


def _sum_of_products(rows: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
    """Return the sum of the products rows[i] matrices[i]. Shapes: rows [N, B, I], matrices [I, O], result [N, B, O]."""
    total, *others = [x.flatten(0, -2) for x in rows]
    total = total @ matrices[0]
    for x, matrix in zip(others, matrices[1:], strict=True):
        total.addmm_(x, matrix)
    return total.view(*rows[0].shape[:-1], -1)
