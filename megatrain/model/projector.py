"""The projector: from the hidden states of the encoder of pictures to those of the decoder (arXiv:2310.03744).

Shapes: P patches (P_local: those of this rank), K pictures of a micro-batch, E the encoder's hidden size, H the
decoder's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from megatrain.config.pictures import encoder_of
from megatrain.model.linear import Linear
from megatrain.model.mlp import Activation, Up


class Projector(nn.Module):
    """branch_in -> up, E to H -> GELU -> down, H to H. The embedding joins the result with the words and adds `bias`.

    Replaceable submodule: `branch_in`. If ranks hold parts of the matrices, each returns a part of a sum, as the
    embedding of the words does; one reduce-scatter sums both.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.branch_in = nn.Identity()
        self.up = Up(encoder_of(config).hidden_size, config.hidden_size, is_gated=False, has_bias=True)
        self.activation = Activation("gelu")
        self.down = Linear(config.hidden_size, config.hidden_size)
        self.bias = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x_PKE: Tensor) -> Tensor:
        """Return the projection of all patches without `bias`. Shapes: x [P_local, K, E]; result [P, K, H]."""
        projected_PKH: Tensor = self.down(self.activation(self.up(self.branch_in(x_PKE)), self.up.bias))
        return projected_PKH
