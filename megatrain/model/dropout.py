"""Dropout of the embedding, and of each branch's output before it is added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from megatrain import rng
from megatrain.model.context import TokenContext
from megatrain.ops.dropout import dropout, residual_dropout


class ResidualDropout(nn.Module):
    """Drops hidden units in training, with a mask keyed by (seed, site) and the global token number."""

    def __init__(self, probability: float, seed: int, site: str) -> None:
        super().__init__()
        self.probability = probability
        self.key = rng.derive_key("dropout", seed, site)

    def forward(self, x_SBH: Tensor, context: TokenContext) -> Tensor:
        if not self.is_active:
            return x_SBH
        return dropout(x_SBH, self.probability, self.key, context.token_numbers(x_SBH.shape[0]))

    def add(self, x_SBH: Tensor, y_SBH: Tensor, bias_H: Tensor | None, context: TokenContext) -> Tensor:
        """Return x + dropout(y + bias)."""
        if not self.is_active:
            return residual_dropout(x_SBH, y_SBH, bias_H, 0.0, self.key, None)
        tokens_SB = context.token_numbers(y_SBH.shape[0])
        return residual_dropout(x_SBH, y_SBH, bias_H, self.probability, self.key, tokens_SB)

    @property
    def is_active(self) -> bool:
        return self.training and self.probability > 0.0
