"""Rules of rotary positions in [model]."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from megatrain.config.model import SCALING_KEYS, SCALING_KEYS_OF, ModelConfig
from megatrain.config.options import options_of
from megatrain.config.problem import Problem, multiples_around, unused_problems
from megatrain.config.toml_text import value_text
from megatrain.formatting import alternatives


def position_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield why the positions cannot be built, and which of their keys do nothing."""
    is_rope = model.positions == "rope"
    if is_rope:
        yield from _width_problems(model)
    else:
        for name in ("rope_theta", "rope_local_theta", "rope_fraction"):
            yield from unused_problems("model", model, name, "positions", "rope")
    if model.rope_local_theta and not model.window_size:
        yield Problem(
            ("model.rope_local_theta", "model.window_size"),
            f"model.rope_local_theta={model.rope_local_theta} does nothing with model.window_size=0; "
            "set window_size, or use rope_local_theta=0.0",
        )
    if 0 < model.rope_local_theta <= 1:
        yield Problem(
            ("model.rope_local_theta",),
            f"model.rope_local_theta={model.rope_local_theta} must be above 1; Gemma 3 has 10000.0; use 0.0 for the "
            "same wavelengths in all layers",
        )
    yield from _scaling_problems(model, is_rope)


def _width_problems(model: ModelConfig) -> Iterator[Problem]:
    is_head_dim_known = model.head_dim > 0 or model.hidden_size % model.num_heads == 0
    if not is_head_dim_known:
        return
    if model.rope_fraction == 1.0 and model.resolved_head_dim % 2:
        yield Problem(
            ("model.head_dim", "model.hidden_size", "model.num_heads", "model.positions"),
            f'model.head_dim={model.resolved_head_dim} must be even for model.positions="rope", which rotates pairs of '
            f"units; use {alternatives(multiples_around(2, model.resolved_head_dim))}",
        )
    elif model.rotated_dim == 0 or model.rotated_dim % 2:
        dim, units = model.resolved_head_dim, 2 * (model.rotated_dim // 2 + 1)
        # rounded up, because the number of units is rounded down
        advice = f"rope_fraction={ceil(1e6 * units / dim) / 1e6:g}" if units <= dim else "a head_dim of at least 2"
        yield Problem(
            ("model.rope_fraction", "model.head_dim"),
            f"model.rope_fraction={model.rope_fraction} of model.head_dim={dim} are "
            f"{model.rotated_dim} units; rotary positions rotate pairs of units, so this number must be even and "
            f"above 0; use {advice}",
        )
    elif model.rope_scaling == "dynamic" and model.rotated_dim == 2:
        yield Problem(
            ("model.rope_scaling", "model.head_dim"),
            'model.rope_scaling="dynamic" needs more than one pair of rotated units, found model.head_dim='
            f'{model.resolved_head_dim} and model.rope_fraction={model.rope_fraction}; use rope_scaling="linear"',
        )


def _scaling_problems(model: ModelConfig, is_rope: bool) -> Iterator[Problem]:
    scaling = model.rope_scaling
    if scaling != "none" and not is_rope:
        yield Problem(
            ("model.rope_scaling", "model.positions"),
            f'model.rope_scaling="{scaling}" needs model.positions="rope", found "{model.positions}"; '
            f'use positions="rope" or rope_scaling="none"',
        )
    if scaling != "none" and is_rope and model.rope_scaling_factor == 1.0:
        yield Problem(
            ("model.rope_scaling_factor", "model.rope_scaling"),
            f'model.rope_scaling_factor=1.0 leaves model.rope_scaling="{scaling}" without effect; '
            f'use a factor above 1 (Llama 3.1 has 8.0) or rope_scaling="none"',
        )
    for name in sorted(SCALING_KEYS - set(SCALING_KEYS_OF.get(scaling, SCALING_KEYS))):
        yield from _unused_scaling_key(model, name)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if scaling == "llama3" and low >= high:
        yield Problem(
            ("model.rope_low_freq_factor", "model.rope_high_freq_factor", "model.rope_scaling"),
            f"model.rope_low_freq_factor={low} must be less than model.rope_high_freq_factor={high}; "
            "Llama 3.1 has 1.0 and 4.0",
        )
    slow, fast = model.rope_beta_slow, model.rope_beta_fast
    if scaling == "yarn" and slow >= fast:
        yield Problem(
            ("model.rope_beta_slow", "model.rope_beta_fast", "model.rope_scaling"),
            f"model.rope_beta_slow={slow} must be less than model.rope_beta_fast={fast}; the method was published "
            "with 1.0 and 32.0",
        )


def _unused_scaling_key(model: ModelConfig, name: str) -> Iterator[Problem]:
    value, default = getattr(model, name), options_of(ModelConfig)[name].default
    if value != default:
        users = [f'"{kind}"' for kind, keys in SCALING_KEYS_OF.items() if name in keys]
        wanted = users[0] if len(users) == 1 else f"{alternatives(tuple(users))},"
        yield Problem(
            (f"model.{name}", "model.rope_scaling"),
            f'model.{name}={value_text(value)} does nothing with model.rope_scaling="{model.rope_scaling}"; '
            f"use rope_scaling={wanted} or {name}={value_text(default)}",
        )
