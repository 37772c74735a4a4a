"""The GPT-2 family: learned positions, LayerNorm, GELU in the tanh approximation, biases everywhere.

Its projections compute x W + b, so their weights are the transpose of megatrain's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.family import PLAIN, Family
from megatrain.hf.tensor_map import HfTensor, fused_in, same

_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh")


class Gpt2(Family):
    """GPT2LMHeadModel."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    prefix = "transformer."
    fixed: ClassVar[Mapping[str, str | bool | float]] = {
        **PLAIN,
        "positions": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            # keys of classifiers
            "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
            # a former name, and an equivalent order of multiplications
            "n_ctx", "reorder_and_upcast_attn",
        }
    )  # fmt: skip
    buffers = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")

    def problems(self, model: ModelConfig) -> list[str]:
        return [*super().problems(model), *self.grouping_problems(model), *self.head_dim_problems(model)]

    def tensors(self, model: ModelConfig) -> Iterator[HfTensor]:
        hidden = model.hidden_size
        yield same("transformer.wte.weight", "embedding.word.weight", (model.vocab_size, hidden))
        yield same("transformer.wpe.weight", "embedding.position", (model.seq_len, hidden))
        for layer in range(model.num_layers):
            yield from _layer_tensors(model, layer)
        yield same("transformer.ln_f.weight", "loss_head.norm.weight", (hidden,))
        yield same("transformer.ln_f.bias", "loss_head.norm.bias", (hidden,))
        if not model.has_tied_head:
            yield same("lm_head.weight", "loss_head.weight", (model.vocab_size, hidden))

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "vocab_size": model.vocab_size,
            "n_positions": model.seq_len,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_heads,
            "n_inner": model.resolved_ffn_size,
            "activation_function": "gelu_new",
            "embd_pdrop": model.dropout,
            "resid_pdrop": model.dropout,
            "attn_pdrop": 0.0,
            "layer_norm_epsilon": model.norm_eps,
            "initializer_range": model.init_std,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": model.has_tied_head,
        }

    def read_config(self, config: ConfigJson) -> dict[str, Any]:
        config.require("activation_function", _TANH_GELUS, default="gelu_new")
        config.require("scale_attn_weights", (True,), default=True)
        config.require("scale_attn_by_inverse_layer_idx", (False,), default=False)
        config.require("add_cross_attention", (False,), default=False)
        hidden_size = config.count("n_embd")
        return {
            "vocab_size": config.count("vocab_size"),
            "seq_len": config.count("n_positions"),
            "hidden_size": hidden_size,
            "num_layers": config.count("n_layer"),
            "num_heads": config.count("n_head"),
            "ffn_size": config.count("n_inner", default=4 * hidden_size),
            "norm_eps": config.number("layer_norm_epsilon", default=1e-5),
            "has_bias": True,
            "dropout": config.number("resid_pdrop", default=0.1),
            "init_std": config.number("initializer_range", default=0.02),
            "has_tied_head": config.flag("tie_word_embeddings", default=True),
        }

    def export_notes(self, model: ModelConfig) -> list[str]:
        if model.has_bias:
            return []
        which = "other biases" if model.has_qkv_bias else "biases"
        return [f"model.has_bias=false: the {which} of {self.architecture} are written as zeros"]

    def import_notes(self, config: ConfigJson) -> list[str]:
        dropout, embedding_dropout, attention_dropout = (
            config.number(key, default=0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")
        )
        notes: list[str] = []
        if embedding_dropout != dropout:
            notes.append(
                f"embd_pdrop={embedding_dropout} is not used in training: model.dropout={dropout} (resid_pdrop) "
                f"applies to the embedding too"
            )
        if attention_dropout:
            notes.append(f"attn_pdrop={attention_dropout} is not used in training: attention has no dropout here")
        return notes


def _layer_tensors(model: ModelConfig, layer: int) -> Iterator[HfTensor]:
    source, ours = f"transformer.h.{layer}", f"blocks.{layer}"
    attention, mlp = f"{ours}.attention_branch", f"{ours}.mlp_branch"
    hidden, ffn = model.hidden_size, model.resolved_ffn_size
    for norm, branch in (("ln_1", attention), ("ln_2", mlp)):
        for leaf in ("weight", "bias"):
            yield same(f"{source}.{norm}.{leaf}", f"{branch}.norm.{leaf}", (hidden,))
    # (HF's name, megatrain's names of weight and bias, whether the bias exists, outputs, inputs, the dim of megatrain's
    # tensor, its ranges)
    qkv = f"{attention}.attention.qkv.weight"
    qkv_shape = (model.num_heads, 3, model.resolved_head_dim, hidden)
    query_key_value = tuple(indices for _, _, indices in fused_in(qkv, qkv_shape))
    projections = (
        ("attn.c_attn", qkv, f"{attention}.attention.qkv.bias", model.resolved_has_qkv_bias, 3 * hidden, hidden,
         1, query_key_value),
        ("attn.c_proj", f"{attention}.attention.out.weight", f"{attention}.attention_bias", model.has_bias, hidden,
         hidden, 0, ((0, hidden),)),
        ("mlp.c_fc", f"{mlp}.mlp.up.weight", f"{mlp}.mlp.up.bias", model.has_bias, ffn, hidden, 0, ((0, 1),)),
        ("mlp.c_proj", f"{mlp}.mlp.down.weight", f"{mlp}.mlp_bias", model.has_bias, hidden, ffn, 0, ((0, hidden),)),
    )  # fmt: skip
    for name, weight, bias, has_bias, outputs, inputs, dim, ranges in projections:
        yield HfTensor(f"{source}.{name}.weight", (inputs, outputs), weight, ranges, dim, is_transposed=True)
        yield HfTensor(f"{source}.{name}.bias", (outputs,), bias, ranges if has_bias else (), dim)
