"""`megatrain train CONFIG`: train in this process, or as one worker where torchrun's environment is present."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatrain.contracts.errors import CheckpointError, ConfigError, DataError, NonFiniteError, TopologyError
from megatrain.contracts.process import process_from_environment

SUMMARY = "train a model: in this process, or as one worker under torchrun"
ACCEPTS_OVERRIDES = True

_SAME_EVERYWHERE = (ConfigError, TopologyError, DataError, CheckpointError, NonFiniteError)
"""Errors that all workers of a host meet alike: its first worker tells of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file; see `megatrain config reference`")


def run(args: argparse.Namespace) -> int:
    from megatrain.train import train

    try:
        return int(train(args.config, args.overrides))
    except _SAME_EVERYWHERE as error:
        if process_from_environment(os.environ).local_rank != 0:
            return int(error.exit_code)
        raise
