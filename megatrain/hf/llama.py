"""The Llama family: rotary positions, RMSNorm, SwiGLU, grouped queries, with or without biases.

Our rotary layout is this family's half-split layout, so the units of queries and keys need no permutation. Families
that differ from it in a few keys are subclasses (qwen2.py, qwen3.py, mistral.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.family import Family
from megatrain.hf.tensor_map import HfTensor, fused_in, same

_SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3"}


class Llama(Family):
    """LlamaForCausalLM."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    prefix = "model."
    fixed: ClassVar[Mapping[str, str | bool]] = {
        "positions": "rope",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "block": "serial",
        "qk_norm": "none",
    }
    buffers = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
    ignored: ClassVar[frozenset[str]] = frozenset({"pretraining_tp", "is_llama_config"})

    def problems(self, model: ModelConfig) -> list[str]:
        found = super().problems(model)
        if model.hidden_size % model.num_heads:
            found.append(
                f"model.hidden_size={model.hidden_size} cannot be exported: {self.architecture} needs a multiple of "
                f"model.num_heads={model.num_heads}, even where head_dim is given"
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
            yield from _layer_tensors(model, layer)
        yield same("model.norm.weight", "loss_head.norm.weight", (model.hidden_size,))
        if not model.has_tied_head:
            yield same("lm_head.weight", "loss_head.weight", rows)

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        # version 4 of transformers and other readers know rope_theta and rope_scaling; version 5 accepts them too
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.resolved_ffn_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.resolved_num_kv_heads,
            "head_dim": model.resolved_head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": model.seq_len,
            "initializer_range": model.init_std,
            "rms_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.has_tied_head,
            "rope_theta": model.rope_theta,
            "rope_scaling": _written_scaling(model),
            "attention_dropout": 0.0,
            **self.written_keys(model),
        }

    def written_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that differ between this family and its subclasses."""
        return {"attention_bias": model.has_bias, "mlp_bias": model.has_bias}

    def read_config(self, config: ConfigJson) -> dict[str, Any]:
        config.require("hidden_act", ("silu", "swish"), default="silu")
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
            "norm_eps": config.number("rms_norm_eps", default=1e-6),
            "init_std": config.number("initializer_range", default=0.02),
            "has_tied_head": config.flag("tie_word_embeddings", default=False),
            **_read_rope(config),
            **self.read_keys(config),
        }

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
        if model.dropout == 0.0:
            return []
        return [f"model.dropout={model.dropout} is not in config.json: {self.architecture} has no such dropout"]

    def import_notes(self, config: ConfigJson) -> list[str]:
        dropout = config.number("attention_dropout", default=0.0)
        return [] if dropout == 0.0 else [f"attention_dropout={dropout} is not used in training: there is none here"]


def _layer_tensors(model: ModelConfig, layer: int) -> Iterator[HfTensor]:
    source, ours = f"model.layers.{layer}", f"blocks.{layer}"
    attention, mlp = f"{ours}.attention_branch", f"{ours}.mlp_branch"
    hidden, ffn, head_dim, groups = (
        model.hidden_size,
        model.resolved_ffn_size,
        model.resolved_head_dim,
        model.resolved_num_kv_heads,
    )
    yield same(f"{source}.input_layernorm.weight", f"{attention}.norm.weight", (hidden,))
    for leaf, inputs in _leaves(hidden, has_bias=model.resolved_has_qkv_bias):
        qkv_shape = (groups, model.num_heads // groups + 2, head_dim, *inputs)
        for part, dim, (start, stop) in fused_in(f"{attention}.attention.qkv.{leaf}", qkv_shape):
            shape = (groups * (stop - start) * head_dim, *inputs)
            name = f"{source}.self_attn.{part}_proj.{leaf}"
            yield HfTensor(name, shape, f"{attention}.attention.qkv.{leaf}", ((start, stop),), dim)
    if model.qk_norm == "head":
        for theirs, norm in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
            yield same(f"{source}.self_attn.{theirs}.weight", f"{attention}.attention.{norm}.weight", (head_dim,))
    yield same(
        f"{source}.self_attn.o_proj.weight", f"{attention}.attention.out.weight", (hidden, model.num_heads * head_dim)
    )
    yield same(f"{source}.post_attention_layernorm.weight", f"{mlp}.norm.weight", (hidden,))
    for leaf, inputs in _leaves(hidden, has_bias=model.has_bias):
        for part, dim, indices in fused_in(f"{mlp}.mlp.up.{leaf}", (2, ffn, *inputs)):
            name = f"{source}.mlp.{part}_proj.{leaf}"
            yield HfTensor(name, (ffn, *inputs), f"{mlp}.mlp.up.{leaf}", (indices,), dim)
    yield same(f"{source}.mlp.down_proj.weight", f"{mlp}.mlp.down.weight", (hidden, ffn))
    if model.has_bias:
        yield same(f"{source}.self_attn.o_proj.bias", f"{attention}.attention_bias", (hidden,))
        yield same(f"{source}.mlp.down_proj.bias", f"{mlp}.mlp_bias", (hidden,))


def _leaves(num_inputs: int, *, has_bias: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (leaf, the dims after the outputs) of a projection: a weight has its inputs, a bias has none."""
    weight: tuple[str, tuple[int, ...]] = ("weight", (num_inputs,))
    return (weight, ("bias", ())) if has_bias else (weight,)


def _written_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.rope_scaling == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": model.rope_scaling, "factor": model.rope_scaling_factor}
    if model.rope_scaling == "llama3":
        scaling["low_freq_factor"] = model.rope_low_freq_factor
        scaling["high_freq_factor"] = model.rope_high_freq_factor
        scaling["original_max_position_embeddings"] = model.rope_original_seq_len
    return scaling


def _read_rope(config: ConfigJson) -> dict[str, Any]:
    """Read rope_theta and rope_scaling, or version 5's rope_parameters, which holds both."""
    rope = config.section("rope_scaling" if "rope_scaling" in config else "rope_parameters")
    for section in (config, rope):
        section.require("partial_rotary_factor", (1.0,), default=1.0)
    type_key = "rope_type" if "rope_type" in rope else "type"
    rope.require(type_key, tuple(_SCALINGS), default="default")
    if "type" in rope:  # the name of before beside the newer one
        rope.require("type", (rope.text(type_key),), default=None)
    theta = rope.number("rope_theta", default=config.number("rope_theta", default=10000.0))
    scaling = _SCALINGS[rope.text(type_key, default="default")]
    factor = rope.number("factor", default=None if scaling != "none" else 1.0)
    found: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if scaling != "none":
        found["rope_scaling_factor"] = factor
    if scaling == "llama3":
        found["rope_low_freq_factor"] = rope.number("low_freq_factor")
        found["rope_high_freq_factor"] = rope.number("high_freq_factor")
        found["rope_original_seq_len"] = rope.count(
            "original_max_position_embeddings", default=config.count("max_position_embeddings")
        )
    if factor == 1.0:  # scaling by 1 changes nothing
        return {"rope_theta": theta, "rope_scaling": "none"}
    return found
