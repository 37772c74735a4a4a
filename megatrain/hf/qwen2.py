"""Qwen 2 and 2.5: Llama with biases of queries, keys and values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.llama import Llama

# keys of the window, which have no effect with use_sliding_window = false
UNUSED_WINDOW = frozenset({"sliding_window", "max_window_layers"})


class Qwen2(Llama):
    """Qwen2ForCausalLM."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    has_free_tokenizer_class = False
    fixed: ClassVar[Mapping[str, str | bool | float]] = {**Llama.fixed, "has_bias": False, "has_qkv_bias": True}
    ignored: ClassVar[frozenset[str]] = UNUSED_WINDOW

    def problems(self, model: ModelConfig) -> list[str]:
        return super().problems(model) + self.head_dim_problems(model)

    def written_keys(self, model: ModelConfig) -> dict[str, Any]:
        return {"use_sliding_window": False}

    def read_keys(self, config: ConfigJson) -> dict[str, Any]:
        require_no_window(config)
        config.require("use_mrope", (False,), default=False)
        return {}


def require_no_window(config: ConfigJson) -> None:
    """Raise CheckpointError if some layers attend only to a window."""
    config.require("use_sliding_window", (False,), default=False)
    config.require_in_layers("layer_types", "full_attention", config.count("num_hidden_layers"))
