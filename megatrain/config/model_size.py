"""The name and the size of every parameter of a model, and their total, without building the model.

Padding rows of the vocabulary count, because they are stored and reduced like all other rows. A tied head is counted
once, as part of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from megatrain.config.model import ModelConfig
from megatrain.config.pictures import ENCODER, PROJECTOR, encoder_of, patch_width
from megatrain.config.variant_parameters import (
    ShapedParameter,
    own_parameters,
    parameters_by_path,
    parameters_of_positions,
)


def parameter_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the number of elements of each parameter by its name. A tied head has no entry."""
    sizes = picture_parameter_sizes(model)
    sizes |= {"embedding.word.weight": model.padded_vocab_size * model.hidden_size} | _position_sizes(model)
    sizes |= _block_sizes(model)
    sizes |= norm_sizes(model, "loss_head.norm")
    if not model.has_tied_head:
        sizes["loss_head.weight"] = model.padded_vocab_size * model.hidden_size
    return sizes


def picture_parameter_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the number of elements of each parameter of the encoder and the projector; none without pictures."""
    if not model.has_pictures:
        return {}
    encoder = encoder_of(model)
    sizes = {
        "position": model.num_patches * encoder.hidden_size,
        "patch.weight": encoder.hidden_size * patch_width(model),
        "patch.bias": encoder.hidden_size,
        **_block_sizes(encoder),
        **norm_sizes(encoder, "norm"),
    }
    return {f"{ENCODER}{name}": size for name, size in sizes.items()} | {
        f"{PROJECTOR}bias": model.hidden_size,
        f"{PROJECTOR}up.weight": model.hidden_size * encoder.hidden_size,
        f"{PROJECTOR}up.bias": model.hidden_size,
        f"{PROJECTOR}down.weight": model.hidden_size**2,
    }


def _block_sizes(model: ModelConfig) -> dict[str, int]:
    block = block_parameter_sizes(model)
    return {f"blocks.{layer}.{name}": size for layer in range(model.num_layers) for name, size in block.items()}


def block_parameter_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the number of elements of each parameter of one block, by its name within the block."""
    if model.block == "parallel":
        return dict(_branch(model, "branch", has_attention=True, has_mlp=True))
    attention = _branch(model, "attention_branch", has_attention=True, has_mlp=False)
    return dict(attention) | dict(_branch(model, "mlp_branch", has_attention=False, has_mlp=True))


def norm_sizes(model: ModelConfig, path: str) -> dict[str, int]:
    """Return the number of elements of each parameter of a norm over the hidden units."""
    if not model.is_own("norm"):
        return dict(_sizes(own_parameters(model, "norm"), path))
    num_vectors = 2 if model.norm == "layernorm" else 1
    return {f"{path}.{leaf}": model.hidden_size for leaf in ("weight", "bias")[:num_vectors]}


def _branch(model: ModelConfig, path: str, *, has_attention: bool, has_mlp: bool) -> Iterator[tuple[str, int]]:
    if model.branch_norm != "output":
        yield from norm_sizes(model, f"{path}.norm").items()
    if model.branch_norm != "input":
        yield from norm_sizes(model, f"{path}.output_norm").items()
    if has_attention:
        yield from _attention(model, f"{path}.attention")
    if has_mlp:
        num_up = model.resolved_ffn_size * (2 if model.is_mlp_gated else 1)
        yield f"{path}.mlp.up.weight", num_up * model.hidden_size
        if model.has_bias:
            yield f"{path}.mlp.up.bias", num_up
        yield from _sizes(own_parameters(model, "mlp"), f"{path}.mlp.activation")
        yield f"{path}.mlp.down.weight", model.hidden_size * model.resolved_ffn_size
    for name, is_there in (("attention_bias", has_attention), ("mlp_bias", has_mlp)):
        if model.has_bias and is_there:
            yield f"{path}.{name}", model.hidden_size


def _position_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the number of elements of each parameter of positions that are added to the embedding."""
    if model.positions == "learned":
        return {"embedding.position": model.seq_len * model.hidden_size}
    return dict(_sizes(parameters_of_positions(model, "add"), "embedding.positions"))


def _sizes(parameters: Mapping[str, ShapedParameter], path: str) -> Iterator[tuple[str, int]]:
    for name, parameter in parameters.items():
        yield f"{path}.{name}", prod(parameter.shape)


def _attention(model: ModelConfig, path: str) -> Iterator[tuple[str, int]]:
    head_dim = model.resolved_head_dim
    num_outputs = (model.num_heads + 2 * model.resolved_num_kv_heads) * head_dim
    yield f"{path}.qkv.weight", num_outputs * model.hidden_size
    if model.resolved_has_qkv_bias:
        yield f"{path}.qkv.bias", num_outputs
    if model.qk_norm == "head":
        yield f"{path}.query_norm.weight", head_dim
        yield f"{path}.key_norm.weight", head_dim
    if model.qk_norm == "all_heads":
        yield f"{path}.all_heads_norm.weight", (model.num_heads + model.resolved_num_kv_heads) * head_dim
    yield from _sizes(parameters_of_positions(model, "rotate"), f"{path}.positions")
    yield from _sizes(own_parameters(model, "attention"), f"{path}.attend_heads")
    yield f"{path}.out.weight", model.hidden_size * model.num_heads * head_dim


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The number of parameters of each part of the model."""

    embedding: int
    position: int
    block: int
    """The parameters of one transformer block."""
    num_blocks: int
    final_norm: int
    head: int
    encoder: int = 0
    """The encoder of pictures and the projector."""

    @property
    def total(self) -> int:
        ends = self.encoder + self.embedding + self.position + self.final_norm + self.head
        return ends + self.num_blocks * self.block


def parameters_by_part(model: ModelConfig) -> ModelSize:
    """Return the number of parameters of each part."""
    table = model.padded_vocab_size * model.hidden_size
    return ModelSize(
        embedding=table,
        position=sum(_position_sizes(model).values()),
        block=sum(block_parameter_sizes(model).values()),
        num_blocks=model.num_layers,
        final_norm=sum(norm_sizes(model, "loss_head.norm").values()),
        head=0 if model.has_tied_head else table,
        encoder=sum(picture_parameter_sizes(model).values()),
    )


def num_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the whole model."""
    return parameters_by_part(model).total


def block_weights(model: ModelConfig) -> int:
    """Return the number of elements in the matrices of one block: without norms, biases and variants' parameters."""
    vectors = ("bias", "norm.weight", *parameters_by_path(model))
    return sum(size for name, size in block_parameter_sizes(model).items() if not name.endswith(vectors))
