"""OLMo 2: Llama with norms of the outputs of attention and feed-forward, and of all heads' queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.llama import Llama


class Olmo2(Llama):
    """Olmo2ForCausalLM."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    has_free_tokenizer_class = False
    fixed: ClassVar[Mapping[str, str | bool | float]] = {
        **Llama.fixed,
        "branch_norm": "output",
        "qk_norm": "all_heads",
        "has_bias": False,
        "has_qkv_bias": False,
    }
    needs_even_heads = False
    ignored: ClassVar[frozenset[str]] = frozenset()
    default_eps = 1e-5

    def written_keys(self, model: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": False}

    def read_keys(self, config: ConfigJson) -> dict[str, Any]:
        config.require("attention_bias", (False,), default=False)
        return {}
