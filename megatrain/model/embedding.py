"""Token and position embedding.

Shapes: S sequence, B micro-batch, H hidden, V padded vocabulary, P patches, K pictures of a micro-batch.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from megatrain.config.variant_parameters import position_methods
from megatrain.model.context import TokenContext
from megatrain.model.dropout import ResidualDropout
from megatrain.model.variant import build_variant
from megatrain.ops.embedding import embedding


class WordEmbedding(nn.Module):
    """Looks up the table's row for each token id."""

    def __init__(self, num_rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size))

    def forward(self, tokens_SB: Tensor) -> Tensor:
        return embedding(tokens_SB, self.weight)


class ProjectedPatches(NamedTuple):
    """The first rows of some samples: the projection of their patches, or this rank's part of a sum, and its bias.

    place_K: the places of these samples in the micro-batch.
    """

    x_PKH: Tensor
    place_K: Tensor
    bias_H: Tensor


class Embedding(nn.Module):
    """Token embeddings. If the configuration requires it, they are multiplied by sqrt(H), and positions are added.

    Replaceable submodule: `embedding_out`, after the lookup and before all operations on single tokens (positions,
    dropout).
    """

    def __init__(self, config: ModelConfig, dropout_seed: int) -> None:
        super().__init__()
        self.word = WordEmbedding(config.padded_vocab_size, config.hidden_size)
        self.embedding_out = nn.Identity()
        self.scale = math.sqrt(config.hidden_size) if config.has_scaled_embedding else 1.0
        self.position: nn.Parameter | None = None
        if config.positions == "learned":
            self.position = nn.Parameter(torch.empty(config.seq_len, config.hidden_size))
        self.positions: Any = build_variant(config, "positions", config) if "add" in position_methods(config) else None
        self.dropout = ResidualDropout(config.dropout, dropout_seed, site="embedding")

    def forward(self, tokens_SB: Tensor, context: TokenContext, patches: ProjectedPatches | None = None) -> Tensor:
        """Return the hidden states. Shapes: tokens [S, B]; result [S, B, H].

        patches: replace the first rows of their samples, so the tokens there do not matter. The factor sqrt(H) is for
        words only.
        """
        if patches is None:
            x_SBH = self._scaled(self.embedding_out(self.word(tokens_SB)))
        else:
            x_SBH = self._with_patches(tokens_SB, context.token_offset, patches)
        if self.position is not None:
            first = context.token_offset
            x_SBH = x_SBH + self.position[first : first + x_SBH.shape[0], None, :]
        if self.positions is not None:
            x_SBH = self.positions.add(x_SBH, context)
        return self.dropout(x_SBH, context)

    def _with_patches(self, tokens_SB: Tensor, first_row: int, patches: ProjectedPatches) -> Tensor:
        """Return the rows of this rank, of which the first has number `first_row`, without positions."""
        x_PKH, place_K, bias_H = patches
        num_patches = len(x_PKH)
        words_SBH = self.word(tokens_SB)
        joined_PBH = words_SBH[:num_patches].index_copy(1, place_K, x_PKH)
        x_SBH = self.embedding_out(torch.cat([joined_PBH, words_SBH[num_patches:]]))
        num_own = min(max(num_patches - first_row, 0), len(x_SBH))
        first_SBH, later_SBH = x_SBH[:num_own], x_SBH[num_own:]
        pictures_SKH = first_SBH.index_select(1, place_K) + bias_H
        return torch.cat([self._scaled(first_SBH).index_copy(1, place_K, pictures_SKH), self._scaled(later_SBH)])

    def _scaled(self, x_SBH: Tensor) -> Tensor:
        return x_SBH if self.scale == 1.0 else x_SBH * _rounded(self.scale, x_SBH.dtype)


@cache
def _rounded(factor: float, dtype: torch.dtype) -> float:
    """Return the factor rounded to `dtype`, as in the training of Gemma.

    The rounding runs on the CPU, because reading a result from the device in each forward would make the host wait.
    """
    rounded: float = torch.tensor(factor, dtype=dtype, device="cpu").item()
    return rounded
