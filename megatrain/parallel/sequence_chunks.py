"""A branch whose matrix products overlap with the exchanges of its rows, chunk by chunk, in forward and in backward.

what is computed                                     | what travels beneath it
forward    first products of chunk k                 | gather of the chunks after it
           last products of chunk k                  | reduce-scatter of the chunks before it
backward   gradient of the last products' inputs     | gather of the gradient's chunks after it
           gradient of their weights, and the middle | gather of the branch's input, again
           gradient of the first products' input     | reduce-scatter of the chunks before it
           gradient of their weights                 | the rest of that

Rows are in the order of their chunks between the two exchanges (comm/sequence_chunks.py), and attention, which does
mind, gets a copy of its product in the sequence's order. A weight's gradient is one product over all rows, never a sum
of chunks: in what it adds up it does not depend on how many there are.
Shapes: S sequence, B micro-batch, H hidden, I inputs and O outputs of a product; a `_local` tensor holds S / tp rows.
Source: MegaScale sec. 3.2; the branch's input is gathered again in backward as Korthikanti et al. (2205.05198) do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.comm.sequence_chunks import (
    RowGathering,
    RowScattering,
    SequenceChunks,
    in_chunk_order,
    in_sequence_order,
)
from megatrain.ops.gradient_sink import gradient_sink_of
from megatrain.ops.linear import weight_gradient
from megatrain.parallel.rematerialize import Rematerializer


class ChunkedMixing(nn.Module):
    """Takes the place of a branch's Mixing where the sequence is spread: [S / tp, B, H] -> [S / tp, B, H].

    keeps_rows: the gathered rows are kept for backward, not gathered again; for blocks that backward runs again anyway.
    """

    def __init__(self, chunks: SequenceChunks, rematerializer: Rematerializer, *, keeps_rows: bool) -> None:
        super().__init__()
        self.chunks = chunks
        self.rematerializer = rematerializer
        self.keeps_rows = keeps_rows

    def forward(
        self, normed_local: Tensor, attention: Any | None, mlp: Any | None, pattern: Any, positions: Any
    ) -> Tensor:
        passage = _Passage(self.chunks, self.keeps_rows)
        first, last = [], []
        if attention is not None:
            first.append((attention.qkv.weight, attention.qkv.bias))
            last.append(attention.out.weight)
        if mlp is not None:
            first.append((mlp.up.weight, None))  # its bias is the activation's
            last.append(mlp.down.weight)
        products = list(gather_and_multiply(normed_local, first, passage))
        inputs = []
        if attention is not None:
            product = in_sequence_order(products.pop(0), self.chunks)
            inputs.append(self._in_chunk_order(attention.attend(product, pattern, positions)))
            del product
        if mlp is not None:
            inputs.append(mlp.activate(products.pop(0)))
        return multiply_and_scatter(inputs, last, normed_local, passage)

    def _in_chunk_order(self, attended: Tensor) -> Tensor:
        """Let backward make the copy again: what attention gave is kept for its own backward already."""
        reorder = partial(in_chunk_order, chunks=self.chunks)
        rows = reorder(attended)
        self.rematerializer.register(rows, attended, reorder)
        return rows


class _Passage:
    """What one run through a branch carries from the backward of its end to that of its beginning: arriving rows."""

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
    x_local: Tensor, factors: Sequence[tuple[Tensor, Tensor | None]], passage: _Passage
) -> tuple[Tensor, ...]:
    """Return the product of the gathered rows with each (weight, bias), in chunk order.

    Shapes: x [S / tp, B, I]; weight [*O, I]; bias [*O]; result [S, B, *O].
    Communication: K all-gathers during the products; K reduce-scatters in backward.
    """
    flat = [one for factor in factors for one in factor]
    products = _GatherAndMultiply.apply(x_local, passage, *flat)
    return tuple(
        product.unflatten(-1, weight.shape[:-1]) for product, (weight, _) in zip(products, factors, strict=True)
    )


def multiply_and_scatter(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], x_local: Tensor, passage: _Passage
) -> Tensor:
    """Return own rows of the sum, over products and ranks, of rows in chunk order times their weights.

    x_local: what the passage began with.
    Shapes: inputs [S, B, I]; weights [O, I]; result [S / tp, B, O].
    Communication: K reduce-scatters during the products; in backward K all-gathers, and K more of x_local.
    """
    again = [] if passage.keeps_rows else [x_local.detach()]
    first = _Keep.apply(*inputs, *weights, *again)
    return _MultiplyAndScatter.apply(first.grad_fn, passage, first, *inputs[1:], *weights)


class _GatherAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, passage: _Passage, *flat: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = flat[::2], flat[1::2]
        matrices = [weight.flatten(0, -2) for weight in weights]
        gathering = RowGathering(x_local, passage.chunks)
        products = [x_local.new_empty(*gathering.rows.shape[:-1], len(matrix)) for matrix in matrices]
        for rows, *outs in zip(gathering.pieces(), *_cut(products, passage), strict=True):
            for out, matrix, bias in zip(outs, matrices, biases, strict=True):
                _multiply(rows, matrix, bias, out)
        ctx.passage = passage
        ctx.sinks = [gradient_sink_of(weight) for weight in weights]
        ctx.bias_shapes = [None if bias is None else bias.shape for bias in biases]
        ctx.save_for_backward(*weights, *([gathering.rows] if passage.keeps_rows else []))
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        passage, saved = ctx.passage, ctx.saved_tensors
        weights, kept = saved[: len(grads)], saved[len(grads) :]
        grads = tuple(grad.contiguous() for grad in grads)
        matrices = [weight.flatten(0, -2) for weight in weights]
        scattering = RowScattering(passage.chunks)
        for pieces in zip(*_cut(grads, passage), strict=True):
            scattering.start(_sum_of_products(pieces, matrices))
        rows = kept[0] if kept else passage.take_rows()
        found: list[Tensor | None] = []
        for number, grad in enumerate(grads):
            needs_weight, needs_bias = ctx.needs_input_grad[2 + 2 * number : 4 + 2 * number]
            weight, sink, shape = weights[number], ctx.sinks[number], ctx.bias_shapes[number]
            found.append(weight_gradient(grad, rows, weight, sink) if needs_weight else None)
            found.append(grad.flatten(0, -2).sum(0).view(shape) if needs_bias else None)
        return scattering.wait(), None, *found


class _Keep(torch.autograd.Function):
    """Saves what the backward of the function after it needs, and hands on the first of it.

    A block that backward runs again is left at the last thing it saves: so before the exchanges, which are not wanted.
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
    def forward(ctx: Any, keep: Any, passage: _Passage, *flat: Tensor) -> Tensor:
        inputs, weights = flat[: len(flat) // 2], flat[len(flat) // 2 :]
        matrices = [weight.t() for weight in weights]
        scattering = RowScattering(passage.chunks)
        for pieces in zip(*_cut(inputs, passage), strict=True):
            scattering.start(_sum_of_products(pieces, matrices))
        ctx.keep = keep
        ctx.passage = passage
        ctx.sinks = [gradient_sink_of(weight) for weight in weights]
        return scattering.wait()

    @staticmethod
    def backward(ctx: Any, grad_local: Tensor) -> tuple[Tensor | None, ...]:
        passage, saved, num_products = ctx.passage, ctx.keep.saved_tensors, len(ctx.sinks)
        inputs, weights, again = saved[:num_products], saved[num_products : 2 * num_products], saved[2 * num_products :]
        grads = [torch.empty_like(x) for x in inputs]
        gathering = RowGathering(grad_local, passage.chunks)
        if again:  # behind the gradient, which is needed first
            passage.start_gathering_again(*again)
        for rows, *outs in zip(gathering.pieces(), *_cut(grads, passage), strict=True):
            for out, weight in zip(outs, weights, strict=True):
                _multiply(rows, weight.t(), None, out)
        found = [
            weight_gradient(gathering.rows, x, weight, sink) if needs_weight else None
            for x, weight, sink, needs_weight in zip(
                inputs, weights, ctx.sinks, ctx.needs_input_grad[2 + num_products :], strict=True
            )
        ]
        return None, None, *grads, *found


def _cut(tensors: Iterable[Tensor], passage: _Passage) -> list[tuple[Tensor, ...]]:
    """Return the pieces of each."""
    return [x.chunk(passage.chunks.num_chunks) for x in tensors]


def _multiply(rows: Tensor, weight_OI: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write rows weight' + bias to `out`, which is contiguous."""
    x, y = rows.flatten(0, -2), out.flatten(0, -2)
    if bias is None:
        torch.mm(x, weight_OI.t(), out=y)
    else:
        torch.addmm(bias.flatten(), x, weight_OI.t(), out=y)


def _sum_of_products(rows: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
    """Return the sum of each rows times its matrix. Shapes: rows [N, B, I], matrices [I, O], result [N, B, O]."""
    total, *others = [x.flatten(0, -2) for x in rows]
    total = total @ matrices[0]
    for x, matrix in zip(others, matrices[1:], strict=True):
        total.addmm_(x, matrix)
    return total.view(*rows[0].shape[:-1], -1)
