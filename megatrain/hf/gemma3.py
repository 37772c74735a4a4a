"""Gemma 3, the language model: Gemma 2 with norms of queries and keys instead of the cap on attention scores.

Five of six layers have a window, and rotary positions with another base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.gemma2 import Gemma2
from megatrain.hf.rope import read_rope, require_whole_heads, rope_section

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


class Gemma3(Gemma2):
    """Gemma3ForCausalLM."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    fixed: ClassVar[Mapping[str, str | bool | float]] = {
        **{key: value for key, value in Gemma2.fixed.items() if key != "rope_local_theta"},
        "attention_softcap": 0.0,
        "qk_norm": "head",
    }
    default_caps: ClassVar[Mapping[str, float]] = {}

    def default_every(self, config: ConfigJson) -> int:
        return config.count("sliding_window_pattern", default=config.count("_sliding_window_pattern", default=6))

    def written_keys(self, model: ModelConfig) -> dict[str, Any]:
        # without windows, no layer uses the local base
        local = model.rope_local_theta or model.rope_theta
        return {**super().written_keys(model), "rope_local_base_freq": local}

    def problems(self, model: ModelConfig) -> list[str]:
        found = super().problems(model)
        if model.window_size and not model.rope_local_theta and model.rope_scaling != "none":
            found.append(
                f'model.rope_scaling="{model.rope_scaling}" cannot be exported with model.rope_local_theta=0: '
                f"{self.architecture} never stretches the positions of layers with a window"
            )
        return found

    def read_keys(self, config: ConfigJson) -> dict[str, Any]:
        found = super().read_keys(config)
        return found if found["window_size"] else {**found, "rope_local_theta": 0.0}

    def read_positions(self, config: ConfigJson) -> dict[str, Any]:
        rope, local = rope_section(config), config.number("rope_local_base_freq", default=_LOCAL_THETA)
        if _GLOBAL in rope or _LOCAL in rope:  # version 5: one object for each kind of layer
            of_windows, rope = rope.section(_LOCAL), rope.section(_GLOBAL)
            of_windows.require("rope_type", ("default",), default="default")
            require_whole_heads(config, of_windows)
            local = of_windows.number("rope_theta", default=local)
        require_whole_heads(config, rope)
        return {**read_rope(config, rope, self.scalings, _GLOBAL_THETA), "rope_local_theta": local}
