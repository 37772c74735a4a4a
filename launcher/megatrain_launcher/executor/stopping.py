"""How an executor stops when somebody asks it to by a signal: the whole job saves and stops, by way of the driver.

A host that no round uses just leaves. One that trains asks the driver to stop the job, as `megatrain job stop` would.
If no driver answers, it asks its own workers to save: all ranks then agree on a step and stop. A second request kills.
Pure: what to do next, from what is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

HALT_S = 10.0
"""So long after it was asked, the driver must have halted the round."""
END_S = 20.0
"""So long after its workers are gone, a host waits for the end of the job."""


class StopStep(Enum):
    """What an executor that shall stop does now."""

    WAIT = "wait"
    ASK_DRIVER = "ask the driver"
    SAVE_HERE = "tell the own workers to save and stop"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class StopView:
    """What is known. Times in seconds since the stop was asked for; None: it has not happened."""

    is_training: bool
    """A round has workers here, or is about to."""
    has_trained: bool
    """There were workers when the stop was asked for."""
    is_halted: bool
    asked_at_s: float | None
    saved_here_at_s: float | None
    idle_since_s: float | None
    now_s: float


def next_step(view: StopView) -> StopStep:
    """Return what to do now."""
    if not view.is_training:
        waited_s = 0.0 if view.idle_since_s is None else view.now_s - view.idle_since_s
        if not view.has_trained or view.saved_here_at_s is not None or waited_s > END_S:
            return StopStep.LEAVE
        return StopStep.WAIT
    if view.is_halted or view.saved_here_at_s is not None:
        return StopStep.WAIT
    if view.asked_at_s is None:
        return StopStep.ASK_DRIVER
    return StopStep.SAVE_HERE if view.now_s - view.asked_at_s > HALT_S else StopStep.WAIT
