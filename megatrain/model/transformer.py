"""The decoder: embedding, blocks and loss head, or the part of these that one pipeline chunk holds.

In a model with pictures, the part with the embedding has the encoder and the projector too (ADR 0087).

Layers keep their global number in every part (`blocks.17.`), so a parameter has the same name in all layouts.
Shapes: S sequence, B micro-batch, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from megatrain.config.kernels import KernelsConfig
from megatrain.config.model import ModelConfig
from megatrain.model.block import Block
from megatrain.model.context import TokenContext
from megatrain.model.embedding import Embedding, ProjectedPatches
from megatrain.model.encoder import PictureEncoder
from megatrain.model.frequencies import RotaryPositions
from megatrain.model.head import LossHead
from megatrain.model.projector import Projector
from megatrain.ops.attention import AttentionPattern
from megatrain.ops.attention_choice import DeviceKind
from megatrain.ops.cross_entropy import CROSS_ENTROPY_ALONE, LossTerms
from megatrain.ops.normalization import ResidualStream


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The layers of a part of the model, and whether it has the embedding and the head."""

    layers: range
    has_embedding: bool
    has_head: bool

    @staticmethod
    def whole(config: ModelConfig) -> ModelPart:
        return ModelPart(range(config.num_layers), has_embedding=True, has_head=True)


class Transformer(nn.Module):
    """A decoder-only language model, or a part of one.

    A tied head: in a part with both embedding and head, `loss_head.weight` is `embedding.word.weight`. A part with only
    the head has its own parameter; the code that splits the model must keep both equal.
    """

    def __init__(
        self,
        config: ModelConfig,
        part: ModelPart | None = None,
        dropout_seed: int = 0,
        kernels: KernelsConfig | None = None,
        loss_terms: LossTerms = CROSS_ENTROPY_ALONE,
        device_kind: DeviceKind | None = None,
    ) -> None:
        """device_kind: the kind of device for which kernels are chosen; None: the device of the tensors."""
        super().__init__()
        self.config = config
        self.kernels = kernels or KernelsConfig()
        self.device_kind = device_kind
        self.part = part or ModelPart.whole(config)
        has_encoder = self.part.has_embedding and config.has_pictures
        self.encoder = PictureEncoder(config, self.kernels, device_kind) if has_encoder else None
        self.projector = Projector(config) if has_encoder else None
        self.embedding = Embedding(config, dropout_seed) if self.part.has_embedding else None
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer, dropout_seed) for layer in self.part.layers})
        tied = self.embedding.word.weight if config.has_tied_head and self.embedding is not None else None
        self.loss_head = LossHead(config, tied, loss_terms) if self.part.has_head else None
        is_rotary = config.positions == "rope"
        self.positions = {
            window: RotaryPositions(config, is_local=window > 0) if is_rotary else None for window in self._windows()
        }

    def hidden(self, x: Tensor, context: TokenContext) -> Tensor:
        """Return the hidden states after this part's blocks.

        Shapes: x is tokens [S, B] if the part has the embedding, else hidden states [S, B, H]; result [S, B, H].
        """
        return self._stream(x, context).total()

    @property
    def all_blocks(self) -> list[nn.Module]:
        """The blocks of this part in the order in which they compute, those of the encoder first."""
        return [*(() if self.encoder is None else self.encoder.blocks.values()), *self.blocks.values()]

    def _stream(self, x: Tensor, context: TokenContext) -> ResidualStream:
        if self.embedding is not None:
            x = self.embedding(x, context, self._projected(context))
        stream = ResidualStream(x)
        whole = replace(context, token_offset=0)  # attention has all rows
        patterns = {window: self._pattern(context, window) for window in self.positions}
        for layer, block in zip(self.part.layers, self.blocks.values(), strict=True):
            window = self.config.window_of(layer)
            stream = block(stream, context, patterns[window], self.positions[window] or whole)
        return stream

    def _projected(self, context: TokenContext) -> ProjectedPatches | None:
        """Return the first rows of the samples with pictures; None if the model or the micro-batch has none."""
        pictures = context.pictures
        if self.encoder is None or self.projector is None or pictures is None:
            return None
        encoded_PKE = self.encoder(pictures, context.sample_B.index_select(0, pictures.place_K))
        return ProjectedPatches(self.projector(encoded_PKE), pictures.place_K, self.projector.bias)

    def _windows(self) -> set[int]:
        """Return the windows of this part's layers: one, or two if only some layers attend to all earlier tokens."""
        return {self.config.window_of(layer) for layer in self.part.layers}

    def _pattern(self, context: TokenContext, window_size: int) -> AttentionPattern:
        return AttentionPattern(
            context.seq_len,
            window_size,
            context.documents,
            self.kernels.attention,
            self.kernels.strict,
            self.device_kind,
            self.config.attention_scale or None,
            self.config.attention_softcap,
        )

    def forward(self, x: Tensor, context: TokenContext, labels_SB: Tensor | None = None) -> Tensor:
        """Return the summed loss if this part has the head and labels are given, else the hidden states."""
        stream = self._stream(x, context)
        if self.loss_head is None or labels_SB is None:
            return stream.total()
        return self.loss_head(stream, labels_SB)
