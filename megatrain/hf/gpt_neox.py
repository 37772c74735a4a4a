"""The GPT-NeoX family (Pythia): LayerNorm, GELU, biases, and rotary positions for a part of each head.

Its files store queries, keys and values of each head side by side, like megatrain's parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.family import PLAIN, Family
from megatrain.hf.rope import SCALINGS, length_notes, read_rope, rope_section, written_length, written_scaling
from megatrain.hf.tensor_map import HfTensor, same

_BLOCKS = {True: "parallel_two_norms", False: "serial"}
_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}


class GptNeoX(Family):
    """GPTNeoXForCausalLM."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    prefix = "gpt_neox."
    renamed: ClassVar[Mapping[str, str]] = {"embed_out.weight": "lm_head.weight"}
    fixed: ClassVar[Mapping[str, str | bool | float]] = {
        **{key: value for key, value in PLAIN.items() if key not in ("block", "rope_fraction")},
        "positions": "rope",
        "norm": "layernorm",
        "has_bias": True,
    }
    buffers = re.compile(
        r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|gpt_neox\.rotary_emb\.inv_freq"
    )
    # a key of classifiers
    ignored: ClassVar[frozenset[str]] = frozenset({"classifier_dropout"})

    def problems(self, model: ModelConfig) -> list[str]:
        found = super().problems(model)
        if model.block not in _BLOCKS.values():
            found.append(f'model.block="{model.block}" cannot be exported: {self.architecture} has two norms a layer')
        if model.mlp not in _ACTIVATIONS.values():
            found.append(f'model.mlp="{model.mlp}" cannot be exported: {self.architecture} has GELU without a gate')
        found += self.scaling_problems(model, SCALINGS.values())
        return [*found, *self.grouping_problems(model), *self.head_dim_problems(model)]

    def tensors(self, model: ModelConfig) -> Iterator[HfTensor]:
        rows, hidden = (model.vocab_size, model.hidden_size), model.hidden_size
        yield same("gpt_neox.embed_in.weight", "embedding.word.weight", rows)
        for layer in range(model.num_layers):
            yield from _layer_tensors(model, layer)
        for leaf in ("weight", "bias"):
            yield same(f"gpt_neox.final_layer_norm.{leaf}", f"loss_head.norm.{leaf}", (hidden,))
        if not model.has_tied_head:
            yield same("lm_head.weight", "loss_head.weight", rows)

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.resolved_ffn_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "hidden_act": "gelu" if model.mlp == "gelu_exact" else "gelu_new",
            "max_position_embeddings": written_length(model),
            "initializer_range": model.init_std,
            "layer_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.has_tied_head,
            "use_parallel_residual": model.block == _BLOCKS[True],
            "rotary_pct": model.rope_fraction,
            "rotary_emb_base": model.rope_theta,
            "rope_scaling": written_scaling(model),
            "attention_bias": True,
            "attention_dropout": 0.0,
            "hidden_dropout": model.dropout,
        }

    def read_config(self, config: ConfigJson) -> dict[str, Any]:
        config.require("hidden_act", tuple(_ACTIVATIONS), default="gelu")
        config.require("attention_bias", (True,), default=True)
        rope = rope_section(config)
        theta = config.number("rotary_emb_base", default=10000.0)
        part = config.number("rotary_pct", default=0.25)
        return {
            "vocab_size": config.count("vocab_size"),
            "seq_len": config.count("max_position_embeddings"),
            "hidden_size": config.count("hidden_size"),
            "num_layers": config.count("num_hidden_layers"),
            "num_heads": config.count("num_attention_heads"),
            "ffn_size": config.count("intermediate_size"),
            "norm_eps": config.number("layer_norm_eps", default=1e-5),
            "init_std": config.number("initializer_range", default=0.02),
            "has_tied_head": config.flag("tie_word_embeddings", default=False),
            "block": _BLOCKS[config.flag("use_parallel_residual", default=True)],
            "mlp": _ACTIVATIONS[config.text("hidden_act", default="gelu")],
            "dropout": config.number("hidden_dropout", default=0.0),
            **read_rope(config, rope, SCALINGS, theta),
            "rope_fraction": rope.number("partial_rotary_factor", default=part),
        }

    def export_notes(self, model: ModelConfig) -> list[str]:
        return length_notes(model)


def _layer_tensors(model: ModelConfig, layer: int) -> Iterator[HfTensor]:
    source, ours = f"gpt_neox.layers.{layer}", f"blocks.{layer}"
    attention, mlp = f"{ours}.attention_branch", f"{ours}.mlp_branch"
    hidden, ffn = model.hidden_size, model.resolved_ffn_size
    for norm, branch in (("input_layernorm", attention), ("post_attention_layernorm", mlp)):
        for leaf in ("weight", "bias"):
            yield same(f"{source}.{norm}.{leaf}", f"{branch}.norm.{leaf}", (hidden,))
    heads = ((0, model.num_heads),)
    qkv, up = f"{attention}.attention.qkv", f"{mlp}.mlp.up"
    for leaf, inputs in (("weight", (hidden,)), ("bias", ())):
        yield HfTensor(f"{source}.attention.query_key_value.{leaf}", (3 * hidden, *inputs), f"{qkv}.{leaf}", heads)
        yield HfTensor(f"{source}.mlp.dense_h_to_4h.{leaf}", (ffn, *inputs), f"{up}.{leaf}", ((0, 1),))
    yield same(f"{source}.attention.dense.weight", f"{attention}.attention.out.weight", (hidden, hidden))
    yield same(f"{source}.attention.dense.bias", f"{attention}.attention_bias", (hidden,))
    yield same(f"{source}.mlp.dense_4h_to_h.weight", f"{mlp}.mlp.down.weight", (hidden, ffn))
    yield same(f"{source}.mlp.dense_4h_to_h.bias", f"{mlp}.mlp_bias", (hidden,))
