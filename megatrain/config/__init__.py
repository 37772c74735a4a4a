"""The configuration of a run: strict TOML and `--section.key=value` settings, read into frozen dataclasses.

Every mistake is found before any process group exists, and all are reported together, each with its key, value, rule,
hint and place. Standard library only, so that the launcher and the diagnostics read the same file.
"""

from __future__ import annotations

from megatrain.config.batch import BatchConfig, BatchSchedule, BatchStage, rampup_levels
from megatrain.config.config import Config
from megatrain.config.load import LoadedConfig, load_config
from megatrain.config.model import ModelConfig
from megatrain.config.model_size import num_parameters, parameters_by_part
from megatrain.config.origin import DefaultOrigin, FileOrigin, OverrideOrigin
from megatrain.config.reference import reference_markdown
from megatrain.config.serialize import config_hash, to_toml

__all__ = [
    "BatchConfig",
    "BatchSchedule",
    "BatchStage",
    "Config",
    "DefaultOrigin",
    "FileOrigin",
    "LoadedConfig",
    "ModelConfig",
    "OverrideOrigin",
    "config_hash",
    "load_config",
    "num_parameters",
    "parameters_by_part",
    "rampup_levels",
    "reference_markdown",
    "to_toml",
]
