"""`python -m megatrain.train`, in which a later worker waits less long until it tells of an error of its own."""

from __future__ import annotations

import sys

from megatrain.cli import main
from megatrain.commands import train

if __name__ == "__main__":
    train._FIRST_WORKER_TELLS_WITHIN_S = 0.2
    sys.exit(main(["train", *sys.argv[1:]]))
