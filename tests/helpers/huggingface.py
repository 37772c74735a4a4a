"""Oracles from transformers: models of our configuration with random weights, and the way from their weights to ours.

The way is a permutation (plus zeros for the padding of the vocabulary), so it carries gradients as well as weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from megatrain.config.model import ModelConfig
from tests.helpers.require import require

require("transformers", find_spec("transformers") is not None, "our models are compared with those of this package")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)


def llama_config(model: ModelConfig) -> PreTrainedConfig:
    """Return the configuration of Llama, or of a family that differs from it in a few keys, that means the same."""
    rope: dict[str, float | str] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling != "none":
        rope |= {"rope_type": model.rope_scaling, "factor": model.rope_scaling_factor}
    if model.rope_scaling == "llama3":
        rope |= {
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_seq_len,
        }
    if model.qk_norm == "head":
        kind, own = Qwen3Config, {}
    elif model.has_qkv_bias:
        kind, own = Qwen2Config, {}
    elif model.window_size:
        kind, own = MistralConfig, {"sliding_window": model.window_size}
    else:
        kind, own = LlamaConfig, {"attention_bias": model.has_bias, "mlp_bias": model.has_bias}
    return kind(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.resolved_ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.resolved_num_kv_heads,
        head_dim=model.resolved_head_dim,
        max_position_embeddings=model.seq_len,
        rms_norm_eps=model.norm_eps,
        rope_parameters=rope,
        **own,
        tie_word_embeddings=model.has_tied_head,
        attn_implementation="sdpa",
    )


def gpt2_config(model: ModelConfig) -> GPT2Config:
    """Return the configuration of GPT-2 that means the same as ours."""
    return GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.seq_len,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_inner=model.resolved_ffn_size,
        activation_function="gelu_new",
        layer_norm_epsilon=model.norm_eps,
        tie_word_embeddings=model.has_tied_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )


def oracle(model: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' model for `model` with random weights, norm scales and biases.

    Llama and its like for rotary positions, else GPT-2. In fp64 they get norms and rotary tables that really compute in
    fp64.
    """
    is_llama = model.positions == "rope"
    found: PreTrainedModel = AutoModelForCausalLM.from_config(llama_config(model) if is_llama else gpt2_config(model))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                is_scale = not name.endswith("bias")
                parameter.copy_(0.2 * noise + (1.0 if is_scale else 0.0))
            else:
                parameter.copy_(noise / math.sqrt(model.hidden_size))
    found = found.to(dtype).eval()
    if is_llama and dtype == torch.float64:
        _compute_in_fp64(found, model)
    return found


def our_weights(theirs: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return tensors under our names and in our shapes, for weights or gradients by transformers' names.

    The head appears under both names when it is tied, as in a state_dict.
    """
    ours = _from_llama(theirs, model) if model.positions == "rope" else _from_gpt2(theirs, model)
    for name in ("embedding.word.weight", "loss_head.weight"):
        if name in ours:
            padding = ours[name].new_zeros(model.padded_vocab_size - model.vocab_size, model.hidden_size)
            ours[name] = torch.cat([ours[name], padding])
    if model.has_tied_head:
        ours["loss_head.weight"] = ours["embedding.word.weight"]
    return ours


def _from_llama(theirs: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    ours = {
        "embedding.word.weight": theirs["model.embed_tokens.weight"],
        "loss_head.norm.weight": theirs["model.norm.weight"],
    }
    if not model.has_tied_head:
        ours["loss_head.weight"] = theirs["lm_head.weight"]
    for layer in range(model.num_layers):
        source, attention, mlp = (
            f"model.layers.{layer}",
            f"blocks.{layer}.attention_branch",
            f"blocks.{layer}.mlp_branch",
        )
        ours[f"{attention}.norm.weight"] = theirs[f"{source}.input_layernorm.weight"]
        ours[f"{mlp}.norm.weight"] = theirs[f"{source}.post_attention_layernorm.weight"]
        for leaf in ("weight", "bias") if model.has_bias or model.has_qkv_bias else ("weight",):
            q, k, v = (theirs[f"{source}.self_attn.{x}_proj.{leaf}"] for x in "qkv")
            ours[f"{attention}.attention.qkv.{leaf}"] = _join_heads(q, k, v, model)
        if model.qk_norm == "head":
            ours[f"{attention}.attention.query_norm.weight"] = theirs[f"{source}.self_attn.q_norm.weight"]
            ours[f"{attention}.attention.key_norm.weight"] = theirs[f"{source}.self_attn.k_norm.weight"]
        for leaf in ("weight", "bias") if model.has_bias else ("weight",):
            gate_and_up = [theirs[f"{source}.mlp.{x}_proj.{leaf}"] for x in ("gate", "up")]
            ours[f"{mlp}.mlp.up.{leaf}"] = torch.stack(gate_and_up)
        ours[f"{attention}.attention.out.weight"] = theirs[f"{source}.self_attn.o_proj.weight"]
        ours[f"{mlp}.mlp.down.weight"] = theirs[f"{source}.mlp.down_proj.weight"]
        if model.has_bias:
            ours[f"{attention}.attention_bias"] = theirs[f"{source}.self_attn.o_proj.bias"]
            ours[f"{mlp}.mlp_bias"] = theirs[f"{source}.mlp.down_proj.bias"]
    return ours


def _from_gpt2(theirs: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    ours = {
        "embedding.word.weight": theirs["transformer.wte.weight"],
        "embedding.position": theirs["transformer.wpe.weight"],
        "loss_head.norm.weight": theirs["transformer.ln_f.weight"],
        "loss_head.norm.bias": theirs["transformer.ln_f.bias"],
    }
    if not model.has_tied_head:
        ours["loss_head.weight"] = theirs["lm_head.weight"]
    for layer in range(model.num_layers):
        source, attention, mlp = (
            f"transformer.h.{layer}",
            f"blocks.{layer}.attention_branch",
            f"blocks.{layer}.mlp_branch",
        )
        for leaf in ("weight", "bias"):
            ours[f"{attention}.norm.{leaf}"] = theirs[f"{source}.ln_1.{leaf}"]
            ours[f"{mlp}.norm.{leaf}"] = theirs[f"{source}.ln_2.{leaf}"]
            # their projections are written as x W + b: the transpose of ours
            q, k, v = _rows(theirs[f"{source}.attn.c_attn.{leaf}"]).chunk(3)
            ours[f"{attention}.attention.qkv.{leaf}"] = _join_heads(q, k, v, model)
            ours[f"{mlp}.mlp.up.{leaf}"] = _rows(theirs[f"{source}.mlp.c_fc.{leaf}"])[None]
        ours[f"{attention}.attention.out.weight"] = theirs[f"{source}.attn.c_proj.weight"].t()
        ours[f"{mlp}.mlp.down.weight"] = theirs[f"{source}.mlp.c_proj.weight"].t()
        ours[f"{attention}.attention_bias"] = theirs[f"{source}.attn.c_proj.bias"]
        ours[f"{mlp}.mlp_bias"] = theirs[f"{source}.mlp.c_proj.bias"]
    return ours


def _rows(x: Tensor) -> Tensor:
    return x.t() if x.dim() == 2 else x


def _join_heads(q: Tensor, k: Tensor, v: Tensor, model: ModelConfig) -> Tensor:
    """Return [G, R + 2, D, ...]: of each group the queries, then key and value."""
    groups, head_dim = model.resolved_num_kv_heads, model.resolved_head_dim
    return torch.cat([x.reshape(groups, -1, head_dim, *x.shape[1:]) for x in (q, k, v)], 1)


class _ExactRotary(nn.Module):
    """Llama's rotary table in fp64, the rule of Llama 3.1 written out by cases."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        dim = model.resolved_head_dim
        frequencies = [model.rope_theta ** (-unit / dim) for unit in range(0, dim, 2)]
        self.frequency = torch.tensor([self._stretched(one, model) for one in frequencies], dtype=torch.float64)

    @staticmethod
    def _stretched(frequency: float, model: ModelConfig) -> float:
        slow = frequency / model.rope_scaling_factor
        if model.rope_scaling != "llama3":
            return slow
        wavelength = 2 * math.pi / frequency
        low, high, length = model.rope_low_freq_factor, model.rope_high_freq_factor, model.rope_original_seq_len
        if wavelength < length / high:
            return frequency
        if wavelength > length / low:
            return slow
        share = (length / wavelength - low) / (high - low)
        return (1 - share) * slow + share * frequency

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].double() * self.frequency
        angle = torch.cat([angle, angle], -1)
        return angle.cos(), angle.sin()


def _compute_in_fp64(llama: PreTrainedModel, model: ModelConfig) -> None:
    """Replace what rounds to fp32 inside: norms by torch's own, the rotary table by an exact one."""

    def exact(norm: nn.Module) -> nn.RMSNorm:
        found = nn.RMSNorm(norm.weight.shape[0], eps=model.norm_eps, dtype=torch.float64)
        found.weight = norm.weight
        return found

    llama.model.norm = exact(llama.model.norm)
    for layer in llama.model.layers:
        layer.input_layernorm = exact(layer.input_layernorm)
        layer.post_attention_layernorm = exact(layer.post_attention_layernorm)
        if model.qk_norm == "head":
            layer.self_attn.q_norm = exact(layer.self_attn.q_norm)
            layer.self_attn.k_norm = exact(layer.self_attn.k_norm)
    llama.model.rotary_emb = _ExactRotary(model)
