"""What a family of Hugging Face models is to us: a way to say our configuration, and a table of tensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatrain.config.model import ModelConfig
from megatrain.config.wording import setting
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.tensor_map import HfTensor


class Family(ABC):
    """One architecture of transformers. Families hold no state."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    prefix: ClassVar[str]
    """What the names of all tensors but the head begin with; a model saved without its head lacks it."""
    fixed: ClassVar[Mapping[str, str]]
    """Keys of [model] for which the family has one value only."""
    buffers: ClassVar[re.Pattern[str]]
    """Constants that old versions stored beside the weights."""

    @abstractmethod
    def tensors(self, model: ModelConfig) -> Iterator[HfTensor]:
        """Yield all tensors of the model; those of one of our parameters stand together."""

    @abstractmethod
    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """Return what config.json says of a model that `problems` finds nothing wrong with."""

    @abstractmethod
    def read_config(self, config: ConfigJson) -> dict[str, Any]:
        """Return the keys of [model] that config.json sets.

        Raises: CheckpointError naming the key for what our model does not compute.
        """

    @abstractmethod
    def export_notes(self, model: ModelConfig) -> list[str]:
        """Return what the exported files do not say of the model, a sentence each."""

    @abstractmethod
    def import_notes(self, config: ConfigJson) -> list[str]:
        """Return what our configuration does not say of the files, a sentence each."""

    def problems(self, model: ModelConfig) -> list[str]:
        """Return a sentence for each key of [model] that this family cannot express."""
        found = [
            f"{setting(f'model.{key}', getattr(model, key))} cannot be exported: {self.architecture} has {value!r} only"
            for key, value in self.fixed.items()
            if getattr(model, key) != value
        ]
        if 0 < model.window_size < model.seq_len:
            found.append(
                f"model.window_size={model.window_size} cannot be exported: {self.architecture} attends to all tokens "
                f"before (window_size=0)"
            )
        return found
