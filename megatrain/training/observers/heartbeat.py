"""The heartbeat of a rank: the black box shows its current step and its last completed step."""

from __future__ import annotations

from megatrain.telemetry.recorder import Recorder
from megatrain.training.observers.step_observer import CompletedStep, StepObserver


class Heartbeat(StepObserver):
    """Records in the black box that a step begins or is complete. Executor, watchdog and daemon read it there."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def before_step(self, index: int) -> None:
        self._recorder.set_step(index)

    def after_step(self, done: CompletedStep) -> str:
        self._recorder.complete_step()
        return ""
