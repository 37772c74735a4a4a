"""The program that wrote a checkpoint, and the one that runs here: what each says of the job and of itself."""

from __future__ import annotations

import platform

import torch

import megatrain
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.contracts.location import Location
from megatrain.contracts.manifest import CheckpointVersions, Manifest


def job_config(manifest: Manifest, place: Location) -> Config:
    """Return the configuration of the job that wrote a checkpoint.

    Raises: CheckpointError when it is of another version of this program.
    """
    try:
        return Config.from_dict(manifest.config)
    except ConfigError as error:
        raise CheckpointError(f"{place}: its configuration is of another version of this program: {error}") from error


def current_versions() -> CheckpointVersions:
    """Return the versions of the programs that run here."""
    return CheckpointVersions(megatrain.__version__, torch.__version__, platform.python_version())
