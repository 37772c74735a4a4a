"""`python -m megatrain.commands.start_from_hf CONFIG HF_DIR [--section.key=value ...]`: the settings, one a line.

A program of its own for `megatrain launch --from-hf`, because the launcher loads no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatrain.cli import run_and_report
from megatrain.contracts.exit_codes import ExitCode


def main() -> int:
    """Import the model unless it is in the run directory, and print the settings with which the job starts from it."""
    return run_and_report(_run)


def _run() -> int:
    from megatrain.conversion.start_from_hf import settings_from_hf

    config, source, *overrides = sys.argv[1:]
    print("\n".join(settings_from_hf(Path(config), overrides, Path(source))))
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
