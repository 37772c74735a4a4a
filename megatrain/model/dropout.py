"""Dropout as the model uses it: on the embedding and on what each branch adds to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from megatrain import rng
from megatrain.model.context import TokenContext
from megatrain.ops.dropout import dropout


class ResidualDropout(nn.Module):
    """Drop hidden units with a mask keyed by (seed, site) and the global token number; nothing in evaluation."""

    def __init__(self, probability: float, seed: int, site: str) -> None:
        super().__init__()
        self.probability = probability
        self.key = rng.derive_key("dropout", seed, site)

    def forward(self, x_SBH: Tensor, context: TokenContext) -> Tensor:
        if self.probability == 0.0 or not self.training:
            return x_SBH
        return dropout(x_SBH, self.probability, self.key, context.token_numbers(x_SBH.shape[0]))
