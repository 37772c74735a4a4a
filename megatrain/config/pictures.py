"""The encoder of pictures as a model of its own: a transformer that attends in both directions.

The blocks are those of the decoder, so the encoder is described by the same class of configuration. Its values are
those of SigLIP's vision models (arXiv:2303.15343): LayerNorm before each sublayer, GELU, biases, learned positions.
"""

from __future__ import annotations

from functools import cache

from megatrain.config.model import ModelConfig

NUM_COLORS = 3
"""Red, green and blue."""
ENCODER, PROJECTOR = "encoder.", "projector."
"""The prefixes of the names of the parameters."""


def patch_width(model: ModelConfig) -> int:
    """Return the number of bytes of a patch: one for each color of each pixel."""
    return model.patch_size**2 * NUM_COLORS


@cache
def encoder_of(model: ModelConfig) -> ModelConfig:
    """Return the configuration of the encoder of a model with pictures. Its sequence consists of the patches.

    It adds its learned positions itself, so `positions` is "none". The vocabulary has no use.
    """
    return ModelConfig(
        vocab_size=1,
        seq_len=model.num_patches,
        hidden_size=model.encoder_hidden_size or model.hidden_size,
        num_layers=model.encoder_num_layers or model.num_layers,
        num_heads=model.encoder_num_heads or model.num_heads,
        ffn_size=model.encoder_ffn_size,
        positions="none",
        init_std=model.init_std,
        is_residual_init_scaled=model.is_residual_init_scaled,
    )
