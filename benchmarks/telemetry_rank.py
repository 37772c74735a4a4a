"""A training process whose telemetry is switched on and off: `python -m benchmarks.telemetry_rank FILE CONFIG`.

It is the worker that `megatrain train` runs. Before the first step of a block, the rank writes its own control page, as
an executor would, and applies it at once. When the times of its steps are enough (on_off.py), it requests its own stop,
as a scheduler would. It writes to FILE when each step began.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.on_off import BLOCK, WARMUP, is_enough, is_on
from megatrain.cli import main
from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import ALL_OPERATIONS, ControlPage
from megatrain.telemetry.recorder import Recorder

SAMPLE_PERIOD = 10


def train(times: Path, config: str) -> int:
    """Train, and record when each step began; return the exit code."""
    began: list[int] = []
    set_step = Recorder.set_step

    def switching(self: Recorder, step: int) -> None:
        if step % BLOCK == 0 and self.path is not None:
            mask = ALL_OPERATIONS if is_on(step) else 0
            write_control(self.path, ControlPage(span_mask=mask, sample_period=SAMPLE_PERIOD))
        now = time.monotonic_ns()
        elapsed_s = (now - began[WARMUP]) / 1e9 if step > WARMUP else 0.0
        if is_enough(step, elapsed_s, lambda: [(b - a) / 1e9 for a, b in pairwise([*began, now])]):
            os.kill(os.getpid(), signal.SIGTERM)
        began.append(time.monotonic_ns())
        set_step(self, step)

    Recorder.set_step = switching  # type: ignore[method-assign]
    code = main(["train", config])
    times.write_text(json.dumps(began))
    return code


if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[1]), sys.argv[2]))
