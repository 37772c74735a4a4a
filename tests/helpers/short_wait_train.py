"""`python -m megatrain.train`, in which a later worker waits less long before it reports an error of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from megatrain.train import train
from megatrain.worker_program import run_worker_program

if __name__ == "__main__":
    sys.exit(run_worker_program(lambda: train(Path(sys.argv[1]), sys.argv[2:]), first_worker_s=0.2))
