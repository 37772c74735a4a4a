"""Requests to the driver of a running job, by people through the command line or the dashboard, or by an executor; and
the driver's answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RequestKind(StrEnum):
    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    STOP = "stop"
    """Save, then end the job."""
    EVICT = "evict"
    """Evict `host` from the round and cordon it."""
    CHECK = "check"
    """Run the health checks of `host`, or of all hosts if it is empty."""
    APPROVE = "approve"
    """Act on `verdict`, which waits for a person."""
    DISMISS = "dismiss"
    """Do not act on `verdict`."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A request. `by`: user@machine for the command line, "USER via dashboard", or executor@HOST."""

    request_id: str
    kind: RequestKind
    by: str
    host: str = ""
    reason: str = ""
    verdict: str = ""
    """The verdict to approve or dismiss."""
    exit_code: int = 0
    """Exit code of a job after a requested stop: 75 after a signal, so that a scheduler restarts the job."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. `is_done`: this is the final answer."""

    request_id: str
    is_accepted: bool
    is_done: bool
    text: str
    at_unix_s: float
