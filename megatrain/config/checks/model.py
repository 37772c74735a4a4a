"""Rules within [model]."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.checks.context import Context
from megatrain.config.checks.positions import position_problems
from megatrain.config.model import ModelConfig
from megatrain.config.problem import Problem, divisors, multiples_around, nearest
from megatrain.formatting import alternatives


def model_problems(context: Context) -> Iterator[Problem]:
    """Yield why the model cannot be built."""
    model = context.config.model
    yield from _head_problems(model)
    yield from position_problems(model)
    yield from _window_problems(model)
    if model.branch_norm != "input" and model.block != "serial":
        yield Problem(
            ("model.branch_norm", "model.block"),
            f'model.branch_norm="{model.branch_norm}" needs model.block="serial", found "{model.block}"; '
            f'use block="serial" or branch_norm="input"',
        )


def _window_problems(model: ModelConfig) -> Iterator[Problem]:
    if model.window_size > model.seq_len:
        yield Problem(
            ("model.window_size", "model.seq_len"),
            f"model.window_size={model.window_size} must be at most model.seq_len={model.seq_len}; "
            f"use {model.seq_len} or less, or 0 for no window",
        )
    every = model.full_attention_every
    if every and not model.window_size:
        yield Problem(
            ("model.full_attention_every", "model.window_size"),
            f"model.full_attention_every={every} does nothing with model.window_size=0; "
            "set window_size, or use full_attention_every=0",
        )
    elif every == 1 or every > model.num_layers:
        which = "no layer has the window" if every == 1 else "no layer is without the window"
        fitting = f"a number from 2 to {model.num_layers}, or " if model.num_layers > 1 else ""
        yield Problem(
            ("model.full_attention_every", "model.num_layers"),
            f"model.full_attention_every={every} with model.num_layers={model.num_layers}: {which}; use "
            f"{fitting}{'window_size=0' if every == 1 else '0'}",
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
