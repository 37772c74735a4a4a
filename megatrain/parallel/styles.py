"""The modules with which the tensor plan replaces submodules of a chunk.

Shapes: S sequence, B micro-batch, H hidden, V local vocabulary, T tokens (S * B), K statistics of the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatrain.comm.group import Group
from megatrain.comm.sequence import (
    all_gather_rows,
    gather_from_sequence,
    reduce_scatter_to_sequence,
    sum_over_ranks,
)
from megatrain.contracts.black_box.operations import Operation
from megatrain.ops.cross_entropy import CROSS_ENTROPY_ALONE, LossTerms, Observe, summed_cross_entropy
from megatrain.ops.embedding import embedding
from megatrain.ops.normalization import ResidualStream
from megatrain.parallel.recompute import SelectiveRecompute


class GatherSequence(nn.Module):
    """[S / tp, B, H] -> [S, B, H]; backward gathers again instead of keeping the whole sequence."""

    def __init__(self, group: Group, selective_recompute: SelectiveRecompute) -> None:
        super().__init__()
        self.group = group
        self.selective_recompute = selective_recompute

    def forward(self, x_local: Tensor) -> Tensor:
        x_SBH = gather_from_sequence(x_local, self.group)
        self.selective_recompute.register(x_SBH, x_local, lambda rows: all_gather_rows(rows, self.group))
        return x_SBH


class ReduceScatterSequence(nn.Module):
    """[S, B, H], a partial sum on each rank -> [S / tp, B, H], this rank's rows of the sum."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, x_SBH: Tensor) -> Tensor:
        return reduce_scatter_to_sequence(x_SBH, self.group)


class SumOfHeads(nn.Module):
    """Sums of squares of the heads that each rank holds -> those of all heads. Shapes: [2, ...], queries then keys.

    num_holders: how many ranks hold the same key, which must count once.
    """

    def __init__(self, group: Group, num_holders: int) -> None:
        super().__init__()
        self.group = group
        self.num_holders = num_holders

    def forward(self, sums: Tensor) -> Tensor:
        queries, keys = sums.unbind()
        return sum_over_ranks(torch.stack([queries, keys / self.num_holders]), self.group)


class VocabularyRows(nn.Module):
    """The rows [first, first + len(weight)) of a word table. Other rows give zeros, to be summed over ranks."""

    def __init__(self, weight: nn.Parameter, first: int) -> None:
        super().__init__()
        self.weight = weight
        self.first = first

    def forward(self, tokens_SB: Tensor) -> Tensor:
        row_SB = tokens_SB - self.first
        is_elsewhere_SB = (row_SB < 0) | (row_SB >= self.weight.shape[0])
        return embedding(row_SB.masked_fill_(is_elsewhere_SB, -1), self.weight)


class VocabularyCrossEntropy(nn.Module):
    """The summed loss if each rank holds some columns of the logits, which are never gathered.

    terms: the terms that training adds; evaluation has only the cross entropy.
    observe: if set, is called in training with the loss of each token, the same on all ranks of the group.
    Communication: over tp, one all-reduce (maximum) of one number per token, and one all-reduce (sum) of two numbers
    per token, or three with label smoothing.
    """

    def __init__(
        self, group: Group, first_column: int, vocab_size: int, terms: LossTerms = CROSS_ENTROPY_ALONE
    ) -> None:
        super().__init__()
        self.group = group
        self.first_column = first_column
        self.vocab_size = vocab_size
        self.terms = terms
        self.observe: Observe | None = None

    def forward(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        return summed_cross_entropy(
            logits_TV,
            labels_T,
            self.vocab_size,
            first_column=self.first_column,
            combine=self._combine,
            terms=self.terms if self.training else CROSS_ENTROPY_ALONE,
            observe=self.observe if self.training else None,
        )

    def _combine(self, statistics_KT: Tensor) -> Tensor:
        lse_T = statistics_KT[0]  # a view: exponentials replace it in place, so that one sum covers all statistics
        largest_T = self.group.all_reduce(lse_T.clone(), Operation.TP_ALL_REDUCE, maximum=True).wait()
        lse_T.sub_(largest_T).exp_()
        self.group.all_reduce(statistics_KT, Operation.TP_ALL_REDUCE).wait()
        lse_T.log_().add_(largest_T)
        return statistics_KT


def recompute_norm(norm: nn.Module, selective_recompute: SelectiveRecompute) -> None:
    """Make backward recompute `norm`'s output from its input sum, which the norm's own backward keeps anyway."""
    forward = norm.forward

    def run(stream: ResidualStream) -> tuple[Tensor, Tensor]:
        y_SBH, x_SBH = forward(stream)
        selective_recompute.register(y_SBH, x_SBH, lambda source: forward(ResidualStream(source))[0])
        return y_SBH, x_SBH

    norm.forward = run


def recompute_output(module: nn.Module, selective_recompute: SelectiveRecompute) -> None:
    """Make backward recompute `module`'s output from its input and its parameters, instead of keeping it."""
    forward: Callable[..., Tensor] = module.forward

    def run(x: Tensor, *parameters: Tensor | None) -> Tensor:
        y = forward(x, *parameters)
        selective_recompute.register(y, x, lambda source: forward(source, *parameters))
        return y

    module.forward = run
