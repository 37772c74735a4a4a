"""Mistral: Llama without biases. Either all layers attend to a window of tokens, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.llama import Llama


class Mistral(Llama):
    """MistralForCausalLM."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    has_free_tokenizer_class = False
    fixed: ClassVar[Mapping[str, str | bool | float]] = {**Llama.fixed, "has_bias": False, "has_qkv_bias": False}
    has_window = True
    needs_even_heads = False
    ignored: ClassVar[frozenset[str]] = frozenset()

    def written_keys(self, model: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": model.window_size or None}

    def read_keys(self, config: ConfigJson) -> dict[str, Any]:
        # transformers uses 4096 if the key is missing, and no window if it is null
        window = 0 if config.has_null("sliding_window") else config.count("sliding_window", default=4096)
        return {"window_size": window if window < config.count("max_position_embeddings") else 0}
