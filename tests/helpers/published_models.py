"""The shapes of published models, for numbers that were published with them."""

from __future__ import annotations

from megatrain.config import ModelConfig

LLAMA_3_8B = ModelConfig(
    vocab_size=128_256,
    seq_len=8192,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    ffn_size=14_336,
    norm="rmsnorm",
    mlp="swiglu",
    has_bias=False,
    positions="rope",
    has_tied_head=False,
)
QWEN_2_5_7B = ModelConfig(
    vocab_size=152_064,
    seq_len=32_768,
    hidden_size=3584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    ffn_size=18_944,
    norm="rmsnorm",
    mlp="swiglu",
    has_bias=False,
    has_qkv_bias=True,
    positions="rope",
    has_tied_head=False,
)
"""Qwen2.5 technical report (arXiv:2412.15115); the model card of Qwen2.5-7B: 7.61 B parameters, 6.53 B without
embeddings."""
QWEN_3_8B = ModelConfig(
    vocab_size=151_936,
    seq_len=32_768,
    hidden_size=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=12_288,
    norm="rmsnorm",
    mlp="swiglu",
    has_bias=False,
    qk_norm="head",
    positions="rope",
    has_tied_head=False,
)
"""Qwen3 technical report (arXiv:2505.09388); the model card of Qwen3-8B: 8.2 B parameters, 6.95 B without
embeddings."""
MISTRAL_7B = ModelConfig(
    vocab_size=32_000,
    seq_len=32_768,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    ffn_size=14_336,
    norm="rmsnorm",
    mlp="swiglu",
    has_bias=False,
    positions="rope",
    has_tied_head=False,
    window_size=4096,
)
"""Mistral 7B (arXiv:2310.06825, table 1); the model card: 7.24 B parameters."""
