"""The job's configuration in a checkpoint's manifest, and the versions of the running software."""

from __future__ import annotations

import platform

import torch

import megatrain
from megatrain.checkpoint_format.location import Location
from megatrain.checkpoint_format.manifest import CheckpointVersions, Manifest
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError, ConfigError


def job_config(manifest: Manifest, location: Location) -> Config:
    """Return the configuration of the job that wrote a checkpoint.

    Raises: CheckpointError when the configuration is not valid in this version of megatrain.
    """
    try:
        return Config.from_dict(manifest.config)
    except ConfigError as error:
        raise CheckpointError(
            f"{location}: its configuration is not valid in this version of megatrain: {error}"
        ) from error


def current_versions() -> CheckpointVersions:
    """Return the versions of megatrain, torch and Python in this process."""
    return CheckpointVersions(megatrain.__version__, torch.__version__, platform.python_version())
