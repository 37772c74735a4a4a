"""`megatrain train CONFIG`: train in this process, or as one worker where torchrun's environment is present."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import process_from_environment
from megatrain.worker_program import run_worker_program

SUMMARY = "train a model: in this process, or as one worker under torchrun"
ACCEPTS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file; see `megatrain config reference`")
    parser.add_argument(
        "--from-hf",
        type=Path,
        metavar="HF_DIR",
        help="start from this Hugging Face model: [model] is that of its config.json, and its weights are imported",
    )


def run(args: argparse.Namespace) -> int:
    return run_worker_program(lambda: _train(args))


def _train(args: argparse.Namespace) -> ExitCode:
    from megatrain.train import train

    settings: list[str] = []
    if args.from_hf is not None:
        from megatrain.conversion.start_from_hf import settings_from_hf

        is_alone = process_from_environment(os.environ).world_size == 1
        settings = settings_from_hf(args.config, args.overrides, args.from_hf, can_import=is_alone)
    return train(args.config, [*settings, *args.overrides])
