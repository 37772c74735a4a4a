"""The Llama family: rotary positions, RMSNorm, SwiGLU, grouped queries, with or without biases.

megatrain uses the same half-split rotary layout, so the units of queries and keys need no permutation. Families that
differ from Llama in a few keys are subclasses, one file each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.family import PLAIN, Family
from megatrain.hf.rope import (
    SCALINGS,
    length_notes,
    read_rope,
    require_whole_heads,
    rope_section,
    written_length,
    written_scaling,
)
from megatrain.hf.tensor_map import HfTensor, fused_in, same

_NORMS = {
    "input": ("input_layernorm", "post_attention_layernorm"),
    "output": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip
"""The names of a layer's norms, in the order of the model, for each value of branch_norm."""


class Llama(Family):
    """LlamaForCausalLM."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    prefix = "model."
    fixed: ClassVar[Mapping[str, str | bool | float]] = {
        **PLAIN,
        "positions": "rope",
        "norm": "rmsnorm",
        "mlp": "swiglu",
    }
    buffers = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
    ignored: ClassVar[frozenset[str]] = frozenset({"pretraining_tp", "is_llama_config"})
    activation_key: ClassVar[str] = "hidden_act"
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")
    """Names of the gate's activation; the first is written."""
    scalings: ClassVar[Mapping[str, str]] = SCALINGS
    """The rope_types of the family -> values of model.rope_scaling."""
    default_eps: ClassVar[float] = 1e-6
    needs_even_heads: ClassVar[bool] = True
    """Whether transformers refuses a hidden size that is not a multiple of the number of heads."""
    is_tied_by_default: ClassVar[bool] = False

    def problems(self, model: ModelConfig) -> list[str]:
        found = [*super().problems(model), *self.scaling_problems(model, self.scalings.values())]
        if self.needs_even_heads and model.hidden_size % model.num_heads:
            found.append(
                f"model.hidden_size={model.hidden_size} cannot be exported: {self.architecture} needs a multiple of "
                f"model.num_heads={model.num_heads}, even if head_dim is given"
            )
        if "has_qkv_bias" not in self.fixed and model.has_qkv_bias and not model.has_bias:
            found.append(
                f"model.has_qkv_bias=true cannot be exported: {self.architecture} has biases everywhere in attention "
                "and feed-forward, or nowhere"
            )
        return found

    def tensors(self, model: ModelConfig) -> Iterator[HfTensor]:
        rows = (model.vocab_size, model.hidden_size)
        yield same("model.embed_tokens.weight", "embedding.word.weight", rows)
        for layer in range(model.num_layers):
            yield from self.layer_tensors(model, layer)
        yield same("model.norm.weight", "loss_head.norm.weight", (model.hidden_size,))
        if not model.has_tied_head:
            yield same("lm_head.weight", "loss_head.weight", rows)

    def layer_tensors(self, model: ModelConfig, layer: int) -> Iterator[HfTensor]:
        """Yield the tensors of one layer."""
        yield from norm_tensors(model, layer)
        yield from _attention_tensors(model, layer)
        yield from _mlp_tensors(model, layer)

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.resolved_ffn_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.resolved_num_kv_heads,
            "head_dim": model.resolved_head_dim,
            self.activation_key: self.activations[0],
            "max_position_embeddings": written_length(model),
            "initializer_range": model.init_std,
            "rms_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.has_tied_head,
            "rope_theta": model.rope_theta,
            "rope_scaling": written_scaling(model),
            "attention_dropout": 0.0,
            **self.written_keys(model),
        }

    def written_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that differ between this family and its subclasses."""
        return {"attention_bias": model.has_bias, "mlp_bias": model.has_bias}

    def read_config(self, config: ConfigJson) -> dict[str, Any]:
        config.require(self.activation_key, self.activations, default=self.activations[0])
        num_heads = config.count("num_attention_heads")
        return {
            "vocab_size": config.count("vocab_size"),
            "seq_len": config.count("max_position_embeddings"),
            "hidden_size": config.count("hidden_size"),
            "num_layers": config.count("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": config.count("num_key_value_heads", default=num_heads),
            "head_dim": config.count("head_dim") if "head_dim" in config else 0,
            "ffn_size": config.count("intermediate_size"),
            "norm_eps": config.number("rms_norm_eps", default=self.default_eps),
            "init_std": config.number("initializer_range", default=0.02),
            "has_tied_head": config.flag("tie_word_embeddings", default=self.is_tied_by_default),
            **self.read_positions(config),
            **self.read_keys(config),
        }

    def read_positions(self, config: ConfigJson) -> dict[str, Any]:
        """Return the keys of [model] about positions."""
        rope = rope_section(config)
        require_whole_heads(config, rope)
        return read_rope(config, rope, self.scalings)

    def read_keys(self, config: ConfigJson) -> dict[str, Any]:
        """Return the keys of [model] whose reading differs between this family and its subclasses."""
        config.require("rope_interleaved", (False,), default=False)
        has_bias = config.flag("attention_bias", default=False)
        if config.flag("mlp_bias", default=False) != has_bias:
            raise config.refusal(
                "mlp_bias", f"must equal attention_bias={str(has_bias).lower()}: one key (has_bias) controls both here"
            )
        return {"has_bias": has_bias}

    def export_notes(self, model: ModelConfig) -> list[str]:
        notes = length_notes(model)
        if model.dropout == 0.0:
            return notes
        return [*notes, f"model.dropout={model.dropout} is not in config.json: {self.architecture} has no such dropout"]


def norm_tensors(model: ModelConfig, layer: int) -> Iterator[HfTensor]:
    """Yield the norms of a layer."""
    branches = (f"blocks.{layer}.attention_branch", f"blocks.{layer}.mlp_branch")
    leaves = {"input": ("norm",), "output": ("output_norm",), "both": ("norm", "output_norm")}[model.branch_norm]
    ours = [f"{branch}.{leaf}.weight" for branch in branches for leaf in leaves]
    for theirs, name in zip(_NORMS[model.branch_norm], ours, strict=True):
        yield same(f"model.layers.{layer}.{theirs}.weight", name, (model.hidden_size,))


def _attention_tensors(model: ModelConfig, layer: int) -> Iterator[HfTensor]:
    source, attention = f"model.layers.{layer}", f"blocks.{layer}.attention_branch"
    hidden, head_dim, groups = model.hidden_size, model.resolved_head_dim, model.resolved_num_kv_heads
    for leaf, inputs in _leaves(hidden, has_bias=model.resolved_has_qkv_bias):
        qkv_shape = (groups, model.num_heads // groups + 2, head_dim, *inputs)
        for part, dim, (start, stop) in fused_in(f"{attention}.attention.qkv.{leaf}", qkv_shape):
            shape = (groups * (stop - start) * head_dim, *inputs)
            name = f"{source}.self_attn.{part}_proj.{leaf}"
            yield HfTensor(name, shape, f"{attention}.attention.qkv.{leaf}", ((start, stop),), dim)
    if model.qk_norm == "head":
        for theirs, norm in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
            yield same(f"{source}.self_attn.{theirs}.weight", f"{attention}.attention.{norm}.weight", (head_dim,))
    if model.qk_norm == "all_heads":
        norm = f"{attention}.attention.all_heads_norm.weight"
        for part, dim, (start, stop) in fused_in(norm, (groups, model.num_heads // groups + 1, head_dim)):
            shape = (groups * (stop - start) * head_dim,)
            yield HfTensor(f"{source}.self_attn.{part}_norm.weight", shape, norm, ((start, stop),), dim)
    yield same(
        f"{source}.self_attn.o_proj.weight", f"{attention}.attention.out.weight", (hidden, model.num_heads * head_dim)
    )
    if model.has_bias:
        yield same(f"{source}.self_attn.o_proj.bias", f"{attention}.attention_bias", (hidden,))


def _mlp_tensors(model: ModelConfig, layer: int) -> Iterator[HfTensor]:
    source, mlp = f"model.layers.{layer}", f"blocks.{layer}.mlp_branch"
    hidden, ffn = model.hidden_size, model.resolved_ffn_size
    for leaf, inputs in _leaves(hidden, has_bias=model.has_bias):
        for part, dim, indices in fused_in(f"{mlp}.mlp.up.{leaf}", (2, ffn, *inputs)):
            name = f"{source}.mlp.{part}_proj.{leaf}"
            yield HfTensor(name, (ffn, *inputs), f"{mlp}.mlp.up.{leaf}", (indices,), dim)
    yield same(f"{source}.mlp.down_proj.weight", f"{mlp}.mlp.down.weight", (hidden, ffn))
    if model.has_bias:
        yield same(f"{source}.mlp.down_proj.bias", f"{mlp}.mlp_bias", (hidden,))


def _leaves(num_inputs: int, *, has_bias: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (leaf, the dims after the outputs) of a projection: a weight has its inputs, a bias has none."""
    weight: tuple[str, tuple[int, ...]] = ("weight", (num_inputs,))
    return (weight, ("bias", ())) if has_bias else (weight,)
