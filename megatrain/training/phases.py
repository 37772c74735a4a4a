"""Phases between the steps: loading, checkpoints, evaluation. Each has its own timeout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatrain.comm import Mesh
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Phase
from megatrain.telemetry.recorder import Recorder


class Phases:
    """Sets how long a phase may take, for exchanges and the watchdog, and records the phase in the black box.

    step_timeout_s: timeout of the exchanges in steps, set again after each phase. extend_grace: passes the watchdog the
    seconds in which no step is expected to end; 0 ends that time.
    """

    def __init__(
        self, mesh: Mesh, recorder: Recorder, extend_grace: Callable[[float], None], step_timeout_s: float
    ) -> None:
        self._mesh = mesh
        self._recorder = recorder
        self._extend_grace = extend_grace
        self._step_timeout_s = step_timeout_s

    @contextmanager
    def enter(self, phase: Phase, timeout_s: float, operation: Operation) -> Iterator[None]:
        """Stay in `phase`, and record a span of `operation`, until the block ends."""
        self._mesh.set_timeout(timeout_s)
        self._extend_grace(timeout_s)
        self._recorder.set_phase(phase)
        with self._recorder.span(operation):
            yield
        self._extend_grace(0.0)
        self._mesh.set_timeout(self._step_timeout_s)
