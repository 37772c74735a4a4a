"""The configuration of a run: strict TOML and `--section.key=value` settings, read into frozen dataclasses.

Every mistake is found before any process group exists, and all are reported together, each with its key, value, rule,
hint and place. Standard library only, so that the launcher and the diagnostics read the same file.
"""

from __future__ import annotations

from megatrain.config.batch import BatchConfig, BatchSchedule, BatchStage, rampup_levels
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.config.checks import check, check_for_training
from megatrain.config.config import Config
from megatrain.config.data import DataConfig
from megatrain.config.evaluation import EvaluationConfig
from megatrain.config.fp8 import Fp8Config
from megatrain.config.job import JobConfig
from megatrain.config.kernels import KernelsConfig
from megatrain.config.load import LoadedConfig, load_config
from megatrain.config.model import ModelConfig
from megatrain.config.model_size import ModelSize, num_parameters, parameters_by_part
from megatrain.config.optimizer import OptimizerConfig
from megatrain.config.origin import DefaultOrigin, FileOrigin, Origin, OverrideOrigin, ProgramOrigin
from megatrain.config.parallel import ParallelConfig
from megatrain.config.recording import LogConfig, ProfileConfig, TelemetryConfig
from megatrain.config.reference import reference_markdown
from megatrain.config.runtime import RuntimeConfig
from megatrain.config.serialize import config_hash, to_toml
from megatrain.config.train import TrainConfig

__all__ = [
    "BatchConfig",
    "BatchSchedule",
    "BatchStage",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DefaultOrigin",
    "EvaluationConfig",
    "FileOrigin",
    "Fp8Config",
    "JobConfig",
    "KernelsConfig",
    "LoadedConfig",
    "LogConfig",
    "ModelConfig",
    "ModelSize",
    "OptimizerConfig",
    "Origin",
    "OverrideOrigin",
    "ParallelConfig",
    "ProfileConfig",
    "ProgramOrigin",
    "RuntimeConfig",
    "TelemetryConfig",
    "TrainConfig",
    "check",
    "check_for_training",
    "config_hash",
    "load_config",
    "num_parameters",
    "parameters_by_part",
    "rampup_levels",
    "reference_markdown",
    "to_toml",
]
