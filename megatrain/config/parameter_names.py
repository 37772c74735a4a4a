"""The name and the size of every parameter of a model, without building it."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.model import ModelConfig


def parameter_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the number of elements of each parameter by name. A tied head is not listed."""
    return dict(_parameters(model))


def _parameters(model: ModelConfig) -> Iterator[tuple[str, int]]:
    yield "embedding.word.weight", model.padded_vocab_size * model.hidden_size
    if model.positions == "learned":
        yield "embedding.position", model.seq_len * model.hidden_size
    for layer in range(model.num_layers):
        if model.block == "parallel":
            yield from _branch(model, f"blocks.{layer}.branch", has_attention=True, has_mlp=True)
        else:
            yield from _branch(model, f"blocks.{layer}.attention_branch", has_attention=True, has_mlp=False)
            yield from _branch(model, f"blocks.{layer}.mlp_branch", has_attention=False, has_mlp=True)
    yield from _norm(model, "loss_head")
    if not model.has_tied_head:
        yield "loss_head.weight", model.padded_vocab_size * model.hidden_size


def _branch(model: ModelConfig, path: str, *, has_attention: bool, has_mlp: bool) -> Iterator[tuple[str, int]]:
    yield from _norm(model, path)
    if has_attention:
        yield from _attention(model, f"{path}.attention")
    if has_mlp:
        num_up = model.resolved_ffn_size * (2 if model.mlp == "swiglu" else 1)
        yield f"{path}.mlp.up.weight", num_up * model.hidden_size
        if model.has_bias:
            yield f"{path}.mlp.up.bias", num_up
        yield f"{path}.mlp.down.weight", model.hidden_size * model.resolved_ffn_size
    for name, is_there in (("attention_bias", has_attention), ("mlp_bias", has_mlp)):
        if model.has_bias and is_there:
            yield f"{path}.{name}", model.hidden_size


def _attention(model: ModelConfig, path: str) -> Iterator[tuple[str, int]]:
    head_dim = model.resolved_head_dim
    num_outputs = (model.num_heads + 2 * model.resolved_num_kv_heads) * head_dim
    yield f"{path}.qkv.weight", num_outputs * model.hidden_size
    if model.resolved_has_qkv_bias:
        yield f"{path}.qkv.bias", num_outputs
    if model.qk_norm == "head":
        yield f"{path}.query_norm.weight", head_dim
        yield f"{path}.key_norm.weight", head_dim
    yield f"{path}.out.weight", model.hidden_size * model.num_heads * head_dim


def _norm(model: ModelConfig, path: str) -> Iterator[tuple[str, int]]:
    yield f"{path}.norm.weight", model.hidden_size
    if model.norm == "layernorm":
        yield f"{path}.norm.bias", model.hidden_size
