"""Planned garbage collection: all ranks collect on the same steps, never in the middle of one.

Python's own collector stops ranks at different moments, and each stop makes all the others wait (MegaScale sec. 5.1;
OSDI'25 stragglers: planned collection gave 12.6 % on 128 ranks). Every full collection is a span, whoever asked for it:
the plan, Python itself, or a library. Left out: collections of young objects only, which take microseconds.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from megatrain.contracts.operations import Operation
from megatrain.telemetry.recorder import Recorder

_OLDEST_GENERATION = 2


class PlannedGarbageCollection:
    """Python's collector switched off, run every `interval` steps. An interval of 0 leaves it as it was."""

    def __init__(self, interval: int, recorder: Recorder) -> None:
        self._interval = interval
        self._recorder = recorder
        self._token = 0
        self._was_enabled = gc.isenabled()
        if interval:
            gc.collect()
            gc.freeze()  # what start-up made lives as long as the process: no need to look at it again
            gc.disable()
        gc.callbacks.append(self._record)

    def after_step(self, step: int) -> None:
        """Collect if `step` is one of the planned ones."""
        if self._interval and step % self._interval == 0:
            gc.collect()

    def _record(self, phase: str, info: Mapping[str, Any]) -> None:
        """Python calls this at begin and end of each collection, in the thread that it has stopped."""
        if info["generation"] != _OLDEST_GENERATION:
            return
        if phase == "start":
            self._token = self._recorder.begin(Operation.GC)
        else:
            self._recorder.end(self._token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave Python's collector as it was found."""
        with suppress(ValueError):  # closed before
            gc.callbacks.remove(self._record)
        if self._interval:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
