"""`megatrain launch --from-hf`: the model is imported by a program of its own, because the launcher loads no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from megatrain.contracts.errors import CheckpointError
from megatrain_launcher.launch.flags import LaunchFlags

_PROGRAM = "megatrain.commands.start_from_hf"


def with_imported_model(flags: LaunchFlags) -> LaunchFlags:
    """Import the model that `flags` name, unless it is in the run directory, and return flags with its settings.

    Raises: CheckpointError with what the program printed.
    """
    if not flags.from_hf:
        return flags
    command = [sys.executable, "-m", _PROGRAM, str(flags.config), flags.from_hf, *flags.overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckpointError(f"--from-hf {flags.from_hf}: {done.stderr.strip().removeprefix('megatrain: error: ')}")
    return replace(flags, overrides=(*done.stdout.splitlines(), *flags.overrides), from_hf="")
