"""How many parameters a model has, exactly, counted from its shape.

Padding rows of the vocabulary count, because they are stored and reduced like all others. A tied head counts once, as
part of the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.model import ModelConfig
from megatrain.config.variants import load_variant


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
        block=_block_parameters(model),
        num_blocks=model.num_layers,
        final_norm=_norm_parameters(model),
        head=0 if model.has_tied_head else table,
    )


def num_parameters(model: ModelConfig) -> int:
    """Return the parameters of the whole model."""
    return parameters_by_part(model).total


def block_weights(model: ModelConfig) -> int:
    """Return the elements of the matrices of one transformer block: all except norms and biases."""
    return sum(inputs * outputs for inputs, outputs in _linears(model))


def _block_parameters(model: ModelConfig) -> int:
    num_norms = (1 if model.block == "parallel" else 2) * (2 if model.branch_norm == "both" else 1)
    qkv, *others = (outputs for _, outputs in _linears(model))
    biases = (qkv if model.resolved_has_qkv_bias else 0) + (sum(others) if model.has_bias else 0)
    num_scaled = {"none": 0, "head": 2, "all_heads": model.num_heads + model.resolved_num_kv_heads}[model.qk_norm]
    head_norms = num_scaled * model.resolved_head_dim
    return num_norms * _norm_parameters(model) + block_weights(model) + biases + head_norms


def _linears(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return the inputs and outputs of each linear layer of a block."""
    hidden, ffn = model.hidden_size, model.resolved_ffn_size
    query_width = model.num_heads * model.resolved_head_dim
    qkv_width = query_width + 2 * model.resolved_num_kv_heads * model.resolved_head_dim
    up_width = 2 * ffn if model.is_mlp_gated else ffn
    return (hidden, qkv_width), (query_width, hidden), (hidden, up_width), (ffn, hidden)


def _norm_parameters(model: ModelConfig) -> int:
    if not model.is_own("norm"):
        return int(load_variant("norm", model.norm).num_vectors) * model.hidden_size
    return 2 * model.hidden_size if model.norm == "layernorm" else model.hidden_size
