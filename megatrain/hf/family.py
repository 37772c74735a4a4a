"""The interface of a family of Hugging Face models, which translates the configuration and lists the tensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.config.toml_text import setting
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.tensor_map import HfTensor

HEAD_NAME = "lm_head.weight"
PLAIN: Mapping[str, str | bool | float] = {
    "block": "serial",
    "branch_norm": "input",
    "qk_norm": "none",
    "attention": "softmax",
    "attention_scale": 0.0,
    "attention_softcap": 0.0,
    "head_softcap": 0.0,
    "has_scaled_embedding": False,
    "rope_fraction": 1.0,
    "rope_local_theta": 0.0,
    "full_attention_every": 0,
}
"""Keys of [model] for which most families support only one value, and these values."""


class Family(ABC):
    """One architecture of transformers. Families hold no state."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    prefix: ClassVar[str]
    """The prefix of all tensor names except the head's. A model that was saved without its head lacks the prefix."""
    fixed: ClassVar[Mapping[str, str | bool | float]]
    """The keys of [model] for which the family has only one value."""
    has_window: ClassVar[bool] = False
    """Whether attention may be limited to a window."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Keys of config.json that do not change what megatrain's model computes, in addition to those of every family."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Names of tensors in older files -> the current names."""
    buffers: ClassVar[re.Pattern[str]]
    """The names of stored tensors that megatrain does not have, such as constants in files of old versions."""
    is_exported: ClassVar[bool] = True
    """Whether models can be exported as this family. False if the family has more than a language model."""
    has_free_tokenizer_class: ClassVar[bool] = True
    """Whether transformers uses the tokenizer class that tokenizer_config.json names, for this `model_type`."""

    @abstractmethod
    def tensors(self, model: ModelConfig) -> Iterator[HfTensor]:
        """Yield all tensors of the model. Tensors made of the same parameter should be adjacent."""

    @abstractmethod
    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json, for a model in which `problems` finds no problem."""

    @abstractmethod
    def read_config(self, config: ConfigJson) -> dict[str, Any]:
        """Return the keys of [model] that config.json sets.

        Raises: CheckpointError, which names the key, when megatrain's model cannot compute what a key requires.
        """

    @abstractmethod
    def export_notes(self, model: ModelConfig) -> list[str]:
        """Return what the exported files cannot represent of the model, as one sentence each."""

    def import_notes(self, config: ConfigJson) -> list[str]:
        """Return what ModelConfig cannot represent of the imported files, as one sentence each."""
        dropout = config.number("attention_dropout", default=0.0)
        note = f"attention_dropout={dropout} is not used in training: attention has no dropout here"
        return [] if dropout == 0.0 else [note]

    def language_model(self, config: ConfigJson) -> ConfigJson:
        """Return the object of a config.json that describes the language model: all of it, by default."""
        return config

    def full_name(self, stored_name: str) -> str:
        """Return the name of a stored tensor in a language model with head, or a name that `buffers` matches."""
        name = self.renamed.get(stored_name, stored_name)
        return name if name.startswith(self.prefix) or name == HEAD_NAME else self.prefix + name

    def head_dim_problems(self, model: ModelConfig) -> list[str]:
        """Return a sentence if the heads' widths do not add up to the hidden size, for a family that requires this."""
        if model.resolved_head_dim * model.num_heads == model.hidden_size:
            return []
        width = f"model.hidden_size={model.hidden_size} / model.num_heads={model.num_heads}"
        return [f"model.head_dim={model.head_dim} cannot be exported: {self.architecture} has {width}"]

    def grouping_problems(self, model: ModelConfig) -> list[str]:
        """Return a sentence if several query heads share a key head, for a family without grouped queries."""
        if model.resolved_num_kv_heads == model.num_heads:
            return []
        heads = f"as many as model.num_heads={model.num_heads}"
        return [f"model.num_kv_heads={model.num_kv_heads} cannot be exported: {self.architecture} has {heads}"]

    def scaling_problems(self, model: ModelConfig, scalings: Collection[str]) -> list[str]:
        """Return a sentence if rope_scaling is not one of `scalings`, which are values of model.rope_scaling."""
        if model.rope_scaling in scalings:
            return []
        return [f'model.rope_scaling="{model.rope_scaling}" cannot be exported: {self.architecture} does not have it']

    def problems(self, model: ModelConfig) -> list[str]:
        """Return one sentence for each key of [model] whose value this family cannot represent."""
        found = [
            f"{setting(f'model.{key}', getattr(model, key))} cannot be exported: {self.architecture} has {value!r} only"
            for key, value in self.fixed.items()
            if getattr(model, key) != value
        ]
        if model.has_pictures:
            found.append(
                f"model.picture_size={model.picture_size} cannot be exported: {self.architecture} has no pictures"
            )
        if not self.has_window and 0 < model.window_size < model.seq_len:
            found.append(
                f"model.window_size={model.window_size} cannot be exported: {self.architecture} attends to all earlier "
                "tokens (window_size=0)"
            )
        return found
