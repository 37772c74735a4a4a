"""Timeouts of the exchanges in a step: longer in the first step of a process, which compiles and allocates."""

from __future__ import annotations

from megatrain.comm import Mesh
from megatrain.config.runtime import RuntimeConfig
from megatrain.training.observers.step_observer import CompletedStep, StepObserver


class ExchangeTimeouts(StepObserver):
    """Sets runtime.first_step_timeout_s for the first step of this process, then runtime.step_timeout_s."""

    def __init__(self, mesh: Mesh, settings: RuntimeConfig) -> None:
        self._mesh = mesh
        self._settings = settings
        self._is_first = True

    def before_step(self, index: int) -> None:
        if self._is_first:
            self._mesh.set_timeout(self._settings.first_step_timeout_s)

    def after_step(self, done: CompletedStep) -> str:
        if self._is_first:
            self._is_first = False
            self._mesh.set_timeout(self._settings.step_timeout_s)
        return ""
