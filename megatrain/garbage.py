"""Planned garbage collection: all ranks collect on the same steps, never in the middle of one.

Python's own collector stops ranks at different moments, and each stop makes all the others wait (MegaScale sec. 5.1;
OSDI'25 stragglers: planned collection gave 12.6 % on 128 ranks).
"""

from __future__ import annotations

import gc
from typing import Self

from megatrain.contracts.operations import Operation
from megatrain.telemetry.recorder import Recorder


class PlannedGarbageCollection:
    """Python's collector switched off, run every `interval` steps. An interval of 0 leaves it as it was."""

    def __init__(self, interval: int, recorder: Recorder) -> None:
        self._interval = interval
        self._recorder = recorder
        self._was_enabled = gc.isenabled()
        if interval:
            gc.collect()
            gc.freeze()  # what start-up made lives as long as the process: no need to look at it again
            gc.disable()

    def after_step(self, step: int) -> None:
        """Collect if `step` is one of the planned ones."""
        if self._interval and step % self._interval == 0:
            with self._recorder.span(Operation.GC):
                gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave Python's collector as it was found."""
        if self._interval:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
