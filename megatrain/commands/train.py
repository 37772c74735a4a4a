"""`megatrain train CONFIG`: train in this process, or as one worker where torchrun's environment is present."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from megatrain.cli import run_and_report
from megatrain.contracts.errors import CheckpointError, ConfigError, DataError, NonFiniteError, TopologyError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import process_from_environment

SUMMARY = "train a model: in this process, or as one worker under torchrun"
ACCEPTS_OVERRIDES = True

_SAME_EVERYWHERE = (ConfigError, TopologyError, DataError, CheckpointError, NonFiniteError)
"""Errors that the workers of a host mostly meet alike: its first worker tells of them."""

_FIRST_WORKER_TELLS_WITHIN_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file; see `megatrain config reference`")


def run(args: argparse.Namespace) -> int:
    code = run_and_report(lambda: _train(args))
    if code not in (ExitCode.OK, ExitCode.SAVED_AND_STOPPED) and "torch" in sys.modules:
        # Groups whose peers may be gone are not torn down: the interpreter's own end would wait for their threads, or
        # abort because of them.
        sys.stderr.flush()
        os._exit(code)
    return code


def _train(args: argparse.Namespace) -> int:
    from megatrain.train import train

    try:
        return int(train(args.config, args.overrides))
    except _SAME_EVERYWHERE:
        if process_from_environment(os.environ).local_rank != 0:
            # Where the first worker meets the same error, the launcher ends this one before it speaks. Gone at once, it
            # could take the first worker with it unheard; silent for good, it would hide an error that it alone has.
            time.sleep(_FIRST_WORKER_TELLS_WITHIN_S)
        raise
