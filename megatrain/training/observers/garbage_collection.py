"""Planned garbage collection: all ranks collect after the same steps, never in the middle of a step.

Python's own collector stops ranks at different moments, and each stop makes all other ranks wait (MegaScale sec. 5.1;
OSDI'25 stragglers: planned collection gave 12.6 % on 128 ranks). Every full collection is a span, including collections
that Python or a library starts. Collections of only young objects are not recorded, because they take microseconds.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.closable import Closable
from megatrain.telemetry.recorder import Recorder
from megatrain.training.observers.step_observer import CompletedStep, StepObserver

_OLDEST_GENERATION = 2


class PlannedGarbageCollection(StepObserver, Closable):
    """Switches Python's collector off and runs it every `interval` steps. An interval of 0 changes nothing."""

    def __init__(self, interval: int, recorder: Recorder) -> None:
        self._interval = interval
        self._recorder = recorder
        self._token = 0
        self._was_enabled = gc.isenabled()
        if interval:
            gc.collect()
            gc.freeze()  # objects created at the start live as long as the process and need no further collection
            gc.disable()
        gc.callbacks.append(self._record)

    def after_step(self, done: CompletedStep) -> str:
        """Collect if a collection is planned after this step."""
        if self._interval and done.progress.step % self._interval == 0:
            gc.collect()
        return ""

    def _record(self, phase: str, info: Mapping[str, Any]) -> None:
        """Record a collection. Python calls this at its start and end, in the thread that runs it."""
        if info["generation"] != _OLDEST_GENERATION:
            return
        if phase == "start":
            self._token = self._recorder.begin(Operation.GC)
        else:
            self._recorder.end(self._token)

    def close(self) -> None:
        """Restore Python's collector."""
        with suppress(ValueError):  # already closed
            gc.callbacks.remove(self._record)
        if self._interval:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
