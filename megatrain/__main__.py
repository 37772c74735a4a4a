"""`python -m megatrain SUBCOMMAND ...`: the command line of a source tree that is not installed."""

from __future__ import annotations

import sys

from megatrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
