"""`python -m megatrain.commands.start_from_hf CONFIG HF_DIR [--section.key=value ...]`: print settings, one a line.

A separate program for `megatrain launch --from-hf`, because the launcher loads no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatrain.cli import run_and_report
from megatrain.contracts.exit_codes import ExitCode


def main() -> int:
    """Import the model if the run directory lacks it, and print the settings with which a job starts from the model."""
    return run_and_report(_run)


def _run() -> int:
    from megatrain.conversion.start_from_hf import settings_from_hf

    config, source, *overrides = sys.argv[1:]
    print("\n".join(settings_from_hf(Path(config), overrides, Path(source))))
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
