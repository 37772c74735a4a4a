"""Initial weights: a distribution for each parameter name. The values are the same in every layout.

Matrices and embeddings are drawn from normal(0, init_std). For the two projections whose outputs are added to the
residual stream, init_std is divided by sqrt(2 * num_layers) (GPT-2's rule; `model.is_residual_init_scaled`). Norm
scales are 1 (weights of zero-centered norms are 0), biases are 0. A parameter of another package's variant has the
value that the variant declares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain import rng
from megatrain.config.model import ModelConfig
from megatrain.config.pictures import ENCODER, encoder_of
from megatrain.config.variant_parameters import parameters_by_path


def initialize_(
    out: Tensor, name: str, config: ModelConfig, seed: int, global_shape: Sequence[int], offsets: Sequence[int]
) -> None:
    """Fill `out`, the part at `offsets` of the parameter `name` (of `global_shape`), with its initial values."""
    if name.startswith(ENCODER):
        config = encoder_of(config)
    with torch.no_grad():
        leaf = name.rsplit(".", 1)[-1]
        of_variant = next(
            (parameter for path, parameter in parameters_by_path(config).items() if name.endswith(f".{path}")), None
        )
        if of_variant is not None:
            out.fill_(of_variant.declared.initial)
        elif leaf.endswith("bias"):
            out.zero_()
        elif name.endswith("norm.weight"):
            out.fill_(0.0 if config.norm == "rmsnorm_zero_centered" else 1.0)
        else:
            is_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            scale = math.sqrt(2.0 * config.num_layers) if is_residual and config.is_residual_init_scaled else 1.0
            key = rng.derive_key("weights", seed, name)
            rng.fill_normal_(out, key, config.init_std / scale, global_shape, offsets)
