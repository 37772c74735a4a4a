"""Rules within [model]."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.checks.context import Context
from megatrain.config.checks.unused import unused_problems
from megatrain.config.model import ModelConfig
from megatrain.config.problem import Problem
from megatrain.config.proposals import divisors, multiples_around, nearest
from megatrain.formatting.lists import alternatives

LLAMA3_KEYS = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_seq_len")


def model_problems(context: Context) -> Iterator[Problem]:
    """Yield why the model cannot be built."""
    model = context.config.model
    yield from _head_problems(model)
    yield from _position_problems(model)
    if model.window_size > model.seq_len:
        yield Problem(
            ("model.window_size", "model.seq_len"),
            f"model.window_size={model.window_size} must be at most model.seq_len={model.seq_len}; "
            f"use {model.seq_len} or less, or 0 for no window",
        )


def _head_problems(model: ModelConfig) -> Iterator[Problem]:
    if model.num_heads % model.resolved_num_kv_heads:
        fitting = alternatives(nearest(divisors(model.num_heads), model.num_kv_heads))
        yield Problem(
            ("model.num_kv_heads", "model.num_heads"),
            f"model.num_kv_heads={model.num_kv_heads} must divide model.num_heads={model.num_heads}; use {fitting}",
        )
    if model.head_dim == 0 and model.hidden_size % model.num_heads:
        fitting = alternatives(nearest(divisors(model.hidden_size), model.num_heads))
        yield Problem(
            ("model.num_heads", "model.hidden_size", "model.head_dim"),
            f"model.num_heads={model.num_heads} must divide model.hidden_size={model.hidden_size}; use {fitting}, "
            f"hidden_size {alternatives(multiples_around(model.num_heads, model.hidden_size))}, or set model.head_dim",
        )


def _position_problems(model: ModelConfig) -> Iterator[Problem]:
    is_rope = model.positions == "rope"
    is_head_dim_known = model.head_dim > 0 or model.hidden_size % model.num_heads == 0
    if is_rope and is_head_dim_known and model.resolved_head_dim % 2:
        yield Problem(
            ("model.head_dim", "model.hidden_size", "model.num_heads", "model.positions"),
            f'model.head_dim={model.resolved_head_dim} must be even for model.positions="rope", which turns pairs; '
            f"use {alternatives(multiples_around(2, model.resolved_head_dim))}",
        )
    if not is_rope:
        yield from unused_problems("model", model, "rope_theta", "positions", "rope")
    yield from _scaling_problems(model, is_rope)


def _scaling_problems(model: ModelConfig, is_rope: bool) -> Iterator[Problem]:
    if model.rope_scaling != "none" and not is_rope:
        yield Problem(
            ("model.rope_scaling", "model.positions"),
            f'model.rope_scaling="{model.rope_scaling}" needs model.positions="rope", found "{model.positions}"; '
            f'use positions="rope" or rope_scaling="none"',
        )
    if model.rope_scaling == "none" and model.rope_scaling_factor != 1.0:
        yield Problem(
            ("model.rope_scaling_factor", "model.rope_scaling"),
            f'model.rope_scaling_factor={model.rope_scaling_factor} does nothing with model.rope_scaling="none"; '
            f'use rope_scaling="linear" or "llama3", or rope_scaling_factor=1.0',
        )
    if model.rope_scaling != "none" and is_rope and model.rope_scaling_factor == 1.0:
        yield Problem(
            ("model.rope_scaling_factor", "model.rope_scaling"),
            f'model.rope_scaling_factor=1.0 leaves model.rope_scaling="{model.rope_scaling}" without effect; '
            f'use a factor above 1 (Llama 3.1 has 8.0) or rope_scaling="none"',
        )
    if model.rope_scaling != "llama3":
        for name in LLAMA3_KEYS:
            yield from unused_problems("model", model, name, "rope_scaling", "llama3")
    if model.rope_scaling == "llama3" and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        yield Problem(
            ("model.rope_low_freq_factor", "model.rope_high_freq_factor", "model.rope_scaling"),
            f"model.rope_low_freq_factor={model.rope_low_freq_factor} must be less than "
            f"model.rope_high_freq_factor={model.rope_high_freq_factor}; Llama 3.1 has 1.0 and 4.0",
        )
