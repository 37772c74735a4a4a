"""How many parameters a model has, exactly, counted from its shape.

Padding rows of the vocabulary count, because they are stored and reduced like all others. A tied head counts once, as
part of the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.model import ModelConfig
from megatrain.config.parameter_names import block_parameter_sizes, norm_sizes
from megatrain.config.variant_parameters import parameters_by_path


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters by part of the model."""

    embedding: int
    position: int
    block: int
    """Of one transformer block."""
    num_blocks: int
    final_norm: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.position + self.num_blocks * self.block + self.final_norm + self.head


def parameters_by_part(model: ModelConfig) -> ModelSize:
    """Return the parameters of each part."""
    table = model.padded_vocab_size * model.hidden_size
    return ModelSize(
        embedding=table,
        position=model.seq_len * model.hidden_size if model.positions == "learned" else 0,
        block=sum(block_parameter_sizes(model).values()),
        num_blocks=model.num_layers,
        final_norm=sum(norm_sizes(model, "loss_head.norm").values()),
        head=0 if model.has_tied_head else table,
    )


def num_parameters(model: ModelConfig) -> int:
    """Return the parameters of the whole model."""
    return parameters_by_part(model).total


def block_weights(model: ModelConfig) -> int:
    """Return the elements of the matrices of one block: all except norms, biases and variants' parameters."""
    vectors = ("bias", "norm.weight", *parameters_by_path(model))
    return sum(size for name, size in block_parameter_sizes(model).items() if not name.endswith(vectors))
