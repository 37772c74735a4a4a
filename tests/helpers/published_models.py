"""The shapes of published models, for the numbers that were published with them."""

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
