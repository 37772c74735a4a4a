"""The job's configuration, as the program that wrote the checkpoint stored it, and the versions of this program."""

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

    Raises: CheckpointError when another version of this program wrote it and it is not valid here.
    """
    try:
        return Config.from_dict(manifest.config)
    except ConfigError as error:
        raise CheckpointError(
            f"{location}: its configuration was written by another version of this program: {error}"
        ) from error


def current_versions() -> CheckpointVersions:
    """Return the versions of megatrain, torch and Python in this process."""
    return CheckpointVersions(megatrain.__version__, torch.__version__, platform.python_version())
