"""Describes how a tensor of a Hugging Face model corresponds to a parameter of megatrain, as data for both directions.

An HF tensor is treated as a list of rows (output features). Each range of one dim of the parameter, with its leading
dims flattened, is the next block of these rows; GPT-2's projections are stored transposed. Both sides are views, so a
copy in one direction is an export, and in the other direction an import.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.model import Transformer
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.placement import row_of


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of an HF model.

    ranges: the ranges of dim `dim` of `parameter` that hold the tensor's rows, in order. Empty if megatrain's model has
    no such parameter; the tensor is then zero.
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    ranges: tuple[tuple[int, int], ...]
    dim: int = 0
    is_transposed: bool = False

    def matching_views(self, stored: Tensor, parameter: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of views of the same shape: of this tensor as HF stores it, and of megatrain's parameter."""
        rows = stored.t() if self.is_transposed else stored
        first = 0
        for start, stop in self.ranges:
            ours = parameter.narrow(self.dim, start, stop - start)
            leading = ours.shape[: ours.dim() - rows.dim() + 1]
            end = first + math.prod(leading)
            yield rows[first:end].unflatten(0, leading), ours
            first = end


def same(name: str, parameter: str, shape: tuple[int, ...]) -> HfTensor:
    """Return the tensor that equals the parameter, or its first rows if the parameter has padding."""
    return HfTensor(name, shape, parameter, ranges=((0, shape[0]),))


def fused_in(parameter: str, shape: Sequence[int]) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """Yield (name, dim, indices [start, stop) of that dim) for each matrix in megatrain's parameter of `shape`."""
    fused = row_of(parameter, decoder_table()).fused
    assert fused is not None, parameter
    for name, indices in fused.ranges(shape).items():
        yield name, fused.dim, indices


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every unsharded parameter of megatrain by name. A tied head is not listed."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}
