"""The families that can be exported and imported, and the choice of a model's family."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatrain.config.batch import BatchConfig
from megatrain.config.checks import check
from megatrain.config.config import Config
from megatrain.config.model import ModelConfig
from megatrain.config.optimizer import OptimizerConfig
from megatrain.config.train import TrainConfig
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.hf.config_json import ConfigJson
from megatrain.hf.family import Family
from megatrain.hf.gpt2 import Gpt2
from megatrain.hf.llama import Llama

FAMILIES: tuple[Family, ...] = (Llama(), Gpt2())

_HINT = (
    "what can be exported: positions rope with norm rmsnorm and mlp swiglu (Llama), or positions learned with norm "
    "layernorm and mlp gelu (GPT-2), both with serial blocks and full attention"
)


def family_for_export(model: ModelConfig) -> Family:
    """Return the family that expresses `model`.

    Raises: ConfigError, which names every key that prevents the export.
    """
    family = next(one for one in FAMILIES if one.fixed["positions"] == model.positions)
    problems = family.problems(model)
    if problems:
        raise ConfigError([f"{problem}; {_HINT}" for problem in problems])
    return family


def family_of(config: ConfigJson) -> Family:
    """Return the family that a config.json names.

    Raises: CheckpointError for any other model.
    """
    config.require("model_type", [family.model_type for family in FAMILIES], default=None)
    if "quantization_config" in config:
        raise config.refusal("quantization_config", "quantized weights cannot be trained; import the original model")
    return next(family for family in FAMILIES if family.model_type == config.text("model_type"))


def read_model(family: Family, config: ConfigJson) -> ModelConfig:
    """Return our configuration of the model that a config.json describes.

    Raises: CheckpointError, which names the file, and the key or the violated rule.
    """
    values: dict[str, Any] = dict(family.fixed) | family.read_config(config)
    model = ModelConfig(**values)
    # check() needs a whole configuration, so the model gets an arbitrary job
    job = Config(
        model=model,
        batch=BatchConfig(global_batch_size=1),
        train=TrainConfig(steps=1),
        optimizer=OptimizerConfig(lr=1.0),
    )
    problems = check(job, {}, None)
    if problems:
        raise CheckpointError(f"{config.location}: describes no model that can be built: {'; '.join(problems)}")
    return model


def section_of(model: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of [model]."""
    return {field.name: getattr(model, field.name) for field in fields(ModelConfig)}
