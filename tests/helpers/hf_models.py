"""Tiny models of the Hugging Face families, and a comparison of both implementations by their logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.hf import Dtype, export_model
from megatrain.hf.tensor_map import parameter_shapes
from megatrain.model import TokenContext, Transformer

GPT2: dict[str, Any] = {
    "vocab_size": 83, "seq_len": 24, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_multiple": 16,
}  # fmt: skip
LLAMA: dict[str, Any] = GPT2 | {
    "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False, "ffn_size": 48,
    "rope_theta": 500.0, "num_kv_heads": 2,
}  # fmt: skip
LLAMA3_SCALING: dict[str, Any] = {
    "rope_scaling": "llama3", "rope_scaling_factor": 8.0, "rope_original_seq_len": 20, "rope_low_freq_factor": 1.5,
    "rope_high_freq_factor": 5.0,
}  # fmt: skip

QWEN2: dict[str, Any] = LLAMA | {"has_qkv_bias": True, "norm_eps": 1e-6}
QWEN3: dict[str, Any] = LLAMA | {"qk_norm": "head", "head_dim": 12, "norm_eps": 1e-6}
YARN: dict[str, Any] = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_seq_len": 12}
GEMMA2: dict[str, Any] = LLAMA | {
    "norm": "rmsnorm_zero_centered", "branch_norm": "both", "mlp": "geglu", "has_scaled_embedding": True,
    "has_tied_head": True, "num_layers": 5, "window_size": 6, "full_attention_every": 2, "attention_scale": 12**-0.5,
    "attention_softcap": 1.5, "head_softcap": 2.0, "norm_eps": 1e-6,
}  # fmt: skip
GEMMA3: dict[str, Any] = GEMMA2 | {
    "qk_norm": "head", "attention_softcap": 0.0, "head_softcap": 0.0, "full_attention_every": 3, "head_dim": 12,
    "attention_scale": 0.0, "rope_local_theta": 100.0, "rope_scaling": "linear", "rope_scaling_factor": 8.0,
}  # fmt: skip
NEOX: dict[str, Any] = GPT2 | {
    "positions": "rope", "rope_fraction": 0.25, "block": "parallel_two_norms", "mlp": "gelu_exact",
    "has_tied_head": False, "ffn_size": 48,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-mha": LLAMA | {"num_kv_heads": 0},
    "llama-tied": LLAMA | {"has_tied_head": True},
    "llama-linear": LLAMA | {"rope_scaling": "linear", "rope_scaling_factor": 4.0},
    "llama-3.1": LLAMA | LLAMA3_SCALING,
    "llama-wide-heads": LLAMA | {"head_dim": 12, "norm_eps": 1e-3},
    "llama-biases": LLAMA | {"has_bias": True},
    "qwen2": QWEN2,
    "qwen2-tied": QWEN2 | {"has_tied_head": True, "num_kv_heads": 4},
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3 | {"has_tied_head": True, "head_dim": 0, "num_kv_heads": 1},
    "qwen3-uneven": QWEN3 | {"hidden_size": 30},
    "mistral": LLAMA | {"window_size": 5},
    "mistral-wide-heads": LLAMA | {"window_size": 1, "head_dim": 12},
    "llama-dynamic": LLAMA | {
        "rope_scaling": "dynamic", "rope_scaling_factor": 2.0, "rope_original_seq_len": 10, "seq_len": 24,
    },
    "llama-yarn": LLAMA | YARN,
    "qwen3-yarn": QWEN3 | YARN | {
        "rope_beta_fast": 4.0, "rope_beta_slow": 0.5, "rope_attention_factor": 1.3, "head_dim": 16,
    },
    "gemma2": GEMMA2,
    "gemma2-uncapped": GEMMA2 | {"attention_softcap": 0.0, "head_softcap": 0.0, "full_attention_every": 0,
                                 "attention_scale": 0.0, "head_dim": 16, "num_kv_heads": 0},
    "gemma2-full": GEMMA2 | {"window_size": 0, "full_attention_every": 0},
    "gemma3": GEMMA3,
    "gemma3-short": GEMMA3 | {
        "window_size": 24, "head_softcap": 3.0, "rope_scaling": "none", "rope_scaling_factor": 1.0,
    },
    "olmo2": LLAMA | {"branch_norm": "output", "qk_norm": "all_heads", "norm_eps": 1e-5},
    "phi3": LLAMA | {"rope_fraction": 0.5, "window_size": 7, "norm_eps": 1e-5},
    "phi3-tied": LLAMA | {"rope_fraction": 0.75, "has_tied_head": True, "num_kv_heads": 0},
    "neox": NEOX,
    "neox-serial": NEOX | {
        "block": "serial", "mlp": "gelu", "rope_fraction": 0.5, "has_tied_head": True, **LLAMA3_SCALING,
    },
    "gpt2": GPT2,
    "gpt2-untied": GPT2 | {"has_tied_head": False, "ffn_size": 40, "norm_eps": 1e-3},
    "gpt2-unpadded": GPT2 | {"vocab_multiple": 1},
}  # fmt: skip

LOGITS_BOUND = 1e-5
"""The largest difference of logits in fp32."""


def tiny(case: str, **changes: Any) -> ModelConfig:
    return ModelConfig(**(CASES[case] | changes))


def random_parameters(model: ModelConfig) -> dict[str, Tensor]:
    """Return random parameters under our names, including the rows that pad the vocabulary."""
    generator = torch.Generator().manual_seed(5)
    parameters: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(model).items():
        noise = torch.randn(shape, generator=generator)
        is_vector = name.endswith(("bias", "norm.weight"))
        scale = 0.2 if is_vector else 1 / math.sqrt(model.hidden_size)
        is_scale = name.endswith("norm.weight") and model.norm != "rmsnorm_zero_centered"
        parameters[name] = scale * noise + (1.0 if is_scale else 0.0)
    return parameters


def export(parameters: Mapping[str, Tensor], model: ModelConfig, directory: Path, dtype: Dtype = "fp32") -> Path:
    export_model(parameters.__getitem__, model, directory, dtype=dtype)
    return directory


def our_logits(parameters: Mapping[str, Tensor], model: ModelConfig, tokens_SB: Tensor) -> Tensor:
    """Return the scores of the tokens that exist. Shapes: result [B, S, V]."""
    ours = Transformer(model).eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(parameters[name])
        assert ours.loss_head is not None
        hidden = ours.hidden(tokens_SB, TokenContext(torch.arange(tokens_SB.shape[1]), tokens_SB.shape[0]))
        return ours.loss_head.logits(hidden)[..., : model.vocab_size].transpose(0, 1)


def their_logits(theirs: Callable[[Tensor], Any], tokens_SB: Tensor) -> Tensor:
    with torch.no_grad():
        return theirs(tokens_SB.t()).logits


def assert_same_logits(found: Tensor, expected: Tensor, bound: float = LOGITS_BOUND, subject: str = "") -> None:
    """Compare logits in fp32. bound: the largest difference."""
    difference = (found - expected).abs().max().item()
    assert difference < bound, f"{subject}: logits up to {expected.abs().max().item():.3g} differ by {difference:.3g}"


def some_tokens(model: ModelConfig) -> Tensor:
    return torch.randint(0, model.vocab_size, (model.seq_len, 3), generator=torch.Generator().manual_seed(1))


def file_contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
