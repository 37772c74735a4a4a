"""The MLP sublayer. Shapes: S sequence, B micro-batch, H hidden, F ffn. F is read from the weight's shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from megatrain.model.linear import Linear, Projection
from megatrain.model.variant import build_variant
from megatrain.ops.activation import bias_geglu, bias_gelu, bias_gelu_exact, bias_swiglu


class Activation(nn.Module):
    """Adds the bias [P, F] and applies the function: [S, B, P, F] -> [S, B, F]. P: see Up."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = _FUNCTIONS[name]

    def forward(self, x_SBPF: Tensor, bias_PF: Tensor | None) -> Tensor:
        return self.function(x_SBPF, bias_PF)


def _gelu(x_SB1F: Tensor, bias_1F: Tensor | None) -> Tensor:
    return bias_gelu(x_SB1F.squeeze(-2), None if bias_1F is None else bias_1F.squeeze(0))


_FUNCTIONS = {"gelu": _gelu, "gelu_exact": bias_gelu_exact, "swiglu": bias_swiglu, "geglu": bias_geglu}


class Up(Projection):
    """The projection from H to F without its bias, which the activation adds in the same pass.

    Weight [P, F, H] and bias [P, F]. P is 1, or 2 if the activation has a gate (gate, up).
    """

    def __init__(self, hidden_size: int, ffn_size: int, *, is_gated: bool, has_bias: bool) -> None:
        super().__init__()
        parts = 2 if is_gated else 1
        self.weight = nn.Parameter(torch.empty(parts, ffn_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(parts, ffn_size)) if has_bias else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        return self.multiply(x_SBH, self.weight).unflatten(-1, self.weight.shape[:2])


class Mlp(nn.Module):
    """up -> activation -> down, without the output bias, which the branch adds after `branch_out`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Up(
            config.hidden_size, config.resolved_ffn_size, is_gated=config.is_mlp_gated, has_bias=config.has_bias
        )
        self.activation = Activation(config.mlp) if config.is_own("mlp") else build_variant(config, "mlp")
        self.down = Linear(config.resolved_ffn_size, config.hidden_size)

    def forward(self, x_SBH: Tensor) -> Tensor:
        return self.down(self.activate(self.up(x_SBH)))

    def activate(self, product_SBPF: Tensor) -> Tensor:
        """Return the activation of the output of `up` plus its bias. Shapes: product [S, B, P, F]; result [S, B, F]."""
        return self.activation(product_SBPF, self.up.bias)
