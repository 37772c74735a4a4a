"""Qwen 3, dense models: Llama with norms of the queries and keys of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.llama import Llama
from megatrain.hf.qwen2 import UNUSED_WINDOW, require_no_window


class Qwen3(Llama):
    """Qwen3ForCausalLM."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    fixed: ClassVar[Mapping[str, str | bool | float]] = {
        **Llama.fixed,
        "has_bias": False,
        "has_qkv_bias": False,
        "qk_norm": "head",
    }
    needs_even_heads = False
    ignored: ClassVar[frozenset[str]] = UNUSED_WINDOW

    def written_keys(self, model: ModelConfig) -> dict[str, Any]:
        return {"use_sliding_window": False, "attention_bias": False}

    def read_keys(self, config: ConfigJson) -> dict[str, Any]:
        require_no_window(config)
        config.require("attention_bias", (False,), default=False)
        return {}
