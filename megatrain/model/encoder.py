"""The encoder of pictures: a vision transformer made of the decoder's blocks (arXiv:2010.11929).

patches -> projection, learned positions -> blocks with a norm before each sublayer, attending in both directions ->
final norm. Shapes: P patches of a picture (P_local: those of this rank), K pictures of a micro-batch, C bytes of
a patch, H the encoder's hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.config.kernels import KernelsConfig
from megatrain.config.model import ModelConfig
from megatrain.config.pictures import encoder_of, patch_width
from megatrain.model.block import Block
from megatrain.model.context import PatchRows, TokenContext
from megatrain.model.norm import build_norm
from megatrain.ops.attention import AttentionPattern
from megatrain.ops.attention_choice import DeviceKind
from megatrain.ops.linear import linear
from megatrain.ops.normalization import ResidualStream

_MIDDLE_COLOR = 127.5


class PatchEmbedding(nn.Module):
    """Turns the bytes of a patch into numbers from -1 to 1, and projects them to H."""

    def __init__(self, num_bytes: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, num_bytes))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, patches_PKC: Tensor) -> Tensor:
        """Return the hidden states. Shapes: patches [P_local, K, C] uint8; result [P_local, K, H]."""
        return linear(patches_PKC.to(self.weight.dtype) / _MIDDLE_COLOR - 1.0, self.weight, self.bias)


class PictureEncoder(nn.Module):
    """The encoder of a model with pictures."""

    def __init__(self, config: ModelConfig, kernels: KernelsConfig, device_kind: DeviceKind | None) -> None:
        super().__init__()
        encoder = encoder_of(config)
        self.kernels = kernels
        self.device_kind = device_kind
        self.num_patches = config.num_patches
        self.patch = PatchEmbedding(patch_width(config), encoder.hidden_size)
        self.position = nn.Parameter(torch.empty(config.num_patches, encoder.hidden_size))
        # without dropout, the seed of its masks has no use
        self.blocks = nn.ModuleDict({str(layer): Block(encoder, layer, 0) for layer in range(encoder.num_layers)})
        self.norm = build_norm(encoder)

    def forward(self, pictures: PatchRows, sample_K: Tensor) -> Tensor:
        """Return the hidden states of this rank's patches, [P_local, K, H]."""
        x_PKH = self.patch(pictures.patches_PKC)
        x_PKH = x_PKH + self.position[pictures.first : pictures.first + len(x_PKH), None, :]
        pattern = AttentionPattern(
            self.num_patches,
            backend=self.kernels.attention,
            is_strict=self.kernels.strict,
            device_kind=self.device_kind,
            is_causal=False,
        )
        stream, context = ResidualStream(x_PKH), TokenContext(sample_K, self.num_patches)
        for block in self.blocks.values():
            stream = block(stream, context, pattern, context)
        normed_PKH: Tensor = self.norm(stream)[0]
        return normed_PKH
