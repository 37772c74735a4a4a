"""How an executor stops on a signal: through the driver, the whole job saves and stops.

A host that no round uses leaves at once. A host that trains asks the driver to stop the job, as `megatrain job stop`
would. If no driver answers, it asks its own workers to save: all ranks then agree on a step and stop. A second request
kills the workers. Pure: returns what to do next, from what is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

HALT_S = 10.0
"""The time limit for the driver to halt the round after the request."""
END_S = 20.0
"""How long after its workers are gone a host waits for the end of the job."""


class StopAction(Enum):
    """What a stopping executor does now."""

    WAIT = "wait"
    ASK_DRIVER = "ask the driver"
    SAVE_HERE = "ask this host's workers to save and stop"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class StopView:
    """What is known. Times in seconds since the stop was requested; None: it has not happened."""

    is_training: bool
    """A round has workers here, or is about to."""
    has_trained: bool
    """There were workers when the stop was requested."""
    is_halted: bool
    asked_at_s: float | None
    saved_here_at_s: float | None
    idle_since_s: float | None
    now_s: float


def next_stop_action(view: StopView) -> StopAction:
    """Return what to do now."""
    if not view.is_training:
        waited_s = 0.0 if view.idle_since_s is None else view.now_s - view.idle_since_s
        if not view.has_trained or view.saved_here_at_s is not None or waited_s > END_S:
            return StopAction.LEAVE
        return StopAction.WAIT
    if view.is_halted or view.saved_here_at_s is not None:
        return StopAction.WAIT
    if view.asked_at_s is None:
        return StopAction.ASK_DRIVER
    return StopAction.SAVE_HERE if view.now_s - view.asked_at_s > HALT_S else StopAction.WAIT
