"""Phi-3 and Phi-4 mini: Llama with queries, keys and values in one tensor, and gate and up in another.

Models whose context was extended after training ("longrope") are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.llama import Llama, norm_tensors
from megatrain.hf.rope import read_rope, rope_section
from megatrain.hf.tensor_map import HfTensor, fused_in, same


class Phi3(Llama):
    """Phi3ForCausalLM."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    has_free_tokenizer_class = False
    fixed: ClassVar[Mapping[str, str | bool | float]] = {
        **{key: value for key, value in Llama.fixed.items() if key != "rope_fraction"},
        "has_bias": False,
        "has_qkv_bias": False,
    }
    has_window = True
    # the length before stretching, which only "longrope" uses; remote code of older versions of the same model
    ignored: ClassVar[frozenset[str]] = frozenset({"original_max_position_embeddings", "auto_map"})
    scalings: ClassVar[Mapping[str, str]] = {"default": "none"}
    default_eps = 1e-5

    def problems(self, model: ModelConfig) -> list[str]:
        return super().problems(model) + self.head_dim_problems(model)

    def layer_tensors(self, model: ModelConfig, layer: int) -> Iterator[HfTensor]:
        yield from norm_tensors(model, layer)
        source, ours = f"model.layers.{layer}", f"blocks.{layer}"
        attention, mlp = f"{ours}.attention_branch.attention", f"{ours}.mlp_branch.mlp"
        hidden, ffn, head_dim = model.hidden_size, model.resolved_ffn_size, model.resolved_head_dim
        groups = model.resolved_num_kv_heads
        qkv = f"{attention}.qkv.weight"
        parts = list(fused_in(qkv, (groups, model.num_heads // groups + 2, head_dim, hidden)))
        rows = (model.num_heads + 2 * groups) * head_dim
        ranges = tuple(indices for _, _, indices in parts)
        yield HfTensor(f"{source}.self_attn.qkv_proj.weight", (rows, hidden), qkv, ranges, dim=1)
        width = model.num_heads * head_dim
        yield same(f"{source}.self_attn.o_proj.weight", f"{attention}.out.weight", (hidden, width))
        yield HfTensor(f"{source}.mlp.gate_up_proj.weight", (2 * ffn, hidden), f"{mlp}.up.weight", ((0, 2),))
        yield same(f"{source}.mlp.down_proj.weight", f"{mlp}.down.weight", (hidden, ffn))

    def written_keys(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "sliding_window": model.window_size or None,
            "partial_rotary_factor": model.rope_fraction,
            "original_max_position_embeddings": model.seq_len,
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
        }

    def read_keys(self, config: ConfigJson) -> dict[str, Any]:
        config.require("attention_bias", (False,), default=False)
        window = config.count("sliding_window", default=config.count("max_position_embeddings"))
        return {
            "window_size": window if window < config.count("max_position_embeddings") else 0,
            "dropout": config.number("resid_pdrop", default=0.0),
        }

    def read_positions(self, config: ConfigJson) -> dict[str, Any]:
        rope = rope_section(config)
        whole = config.number("partial_rotary_factor", default=1.0)
        return {
            **read_rope(config, rope, self.scalings),
            "rope_fraction": rope.number("partial_rotary_factor", default=whole),
        }

    def export_notes(self, model: ModelConfig) -> list[str]:
        return []

    def import_notes(self, config: ConfigJson) -> list[str]:
        dropout = config.number("resid_pdrop", default=0.0)
        embedding = config.number("embd_pdrop", default=0.0)
        notes = super().import_notes(config)
        if embedding != dropout:
            notes.append(
                f"embd_pdrop={embedding} is not used in training: model.dropout={dropout} (resid_pdrop) applies to "
                "the embedding too"
            )
        return notes
