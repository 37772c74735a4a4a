"""`megatrain train CONFIG`: train in this process, or as one worker where torchrun's environment is present."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatrain.contracts.exit_codes import ExitCode
from megatrain.worker_program import run_worker_program

SUMMARY = "train a model: in this process, or as one worker under torchrun"
ACCEPTS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file; see `megatrain config reference`")


def run(args: argparse.Namespace) -> int:
    return run_worker_program(lambda: _train(args))


def _train(args: argparse.Namespace) -> ExitCode:
    from megatrain.train import train

    return train(args.config, args.overrides)
