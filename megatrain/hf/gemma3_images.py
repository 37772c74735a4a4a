"""Gemma 3 with images: only the language model is read. An export writes it as Gemma3ForCausalLM.

Without images, both models compute the same: only tokens of the same image attend to each other in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from megatrain.hf.config_json import ConfigJson
from megatrain.hf.gemma3 import Gemma3

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}
"""Defaults of keys that transformers leaves out of the nested object text_config."""
_LANGUAGE_PREFIXES = ("language_model.", "model.language_model.")


class Gemma3Images(Gemma3):
    """Gemma3ForConditionalGeneration."""

    model_type = "gemma3"
    architecture = "Gemma3ForConditionalGeneration"
    is_exported = False
    # the head belongs to the outer model, which does not cap its logits
    fixed: ClassVar[Mapping[str, str | bool | float]] = {**Gemma3.fixed, "head_softcap": 0.0}
    ignored: ClassVar[frozenset[str]] = Gemma3.ignored | {
        "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
        "initializer_range",
    }  # fmt: skip
    buffers: ClassVar[re.Pattern[str]] = re.compile(r"model\.(vision_tower|multi_modal_projector)\..*")

    def language_model(self, config: ConfigJson) -> ConfigJson:
        # the head belongs to the outer model, so the outer key applies
        config.require("tie_word_embeddings", (True,), default=True)
        if config.has_null("tie_word_embeddings"):
            raise config.refusal(
                "tie_word_embeddings", "transformers reads null as false, and only true is computed here"
            )
        described = config.described("text_config", _DEFAULTS)
        described.require("model_type", (Gemma3.model_type,), default=Gemma3.model_type)
        described.require("tie_word_embeddings", (True,), default=True)
        return described

    def full_name(self, stored_name: str) -> str:
        for prefix in _LANGUAGE_PREFIXES:
            if stored_name.startswith(prefix):
                return super().full_name(stored_name.removeprefix(prefix))
        return super().full_name(stored_name)

    def import_notes(self, config: ConfigJson) -> list[str]:
        left_out = (
            "the parts that read images (vision_tower, multi_modal_projector) are left out: the model reads text only"
        )
        return [*super().import_notes(config), left_out]
