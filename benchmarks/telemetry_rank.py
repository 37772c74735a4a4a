"""A training process whose telemetry is switched on and off: `python -m benchmarks.telemetry_rank FILE BLOCK CONFIG`.

It is the worker that `megatrain train` runs. Before the first step of a block, a rank writes its own control page, as
an executor would, and applies it at once. Rank 0 writes to FILE when each step began.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from megatrain.cli import main
from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import ALL_OPERATIONS, ControlPage
from megatrain.telemetry.recorder import Recorder

SAMPLE_PERIOD = 10


def is_on(step: int, block: int) -> bool:
    """Return whether telemetry is on in a step. Blocks are on, off, off, on, so that a drift favours neither."""
    place = step // block % 4
    return place in (0, 3)


def train(times: Path, block: int, config: str) -> int:
    """Train, and record when each step began; return the exit code."""
    began: list[int] = []
    set_step = Recorder.set_step

    def switching(self: Recorder, step: int) -> None:
        if step % block == 0 and self.path is not None:
            mask = ALL_OPERATIONS if is_on(step, block) else 0
            write_control(self.path, ControlPage(span_mask=mask, sample_period=SAMPLE_PERIOD))
        began.append(time.monotonic_ns())
        set_step(self, step)

    Recorder.set_step = switching  # type: ignore[method-assign]
    code = main(["train", config])
    if os.environ.get("RANK", "0") == "0":
        times.write_text(json.dumps(began))
    return code


if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
