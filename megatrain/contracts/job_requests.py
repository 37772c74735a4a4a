"""What a person asks of a running job through the command line, and the driver's answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RequestKind(StrEnum):
    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    STOP = "stop"
    """Save, then end the job."""
    EVICT = "evict"
    """Take `host` out of the round and cordon it."""
    CHECK = "check"
    """Run the health checks of `host`, or of all hosts where it is empty."""
    APPROVE = "approve"
    """Do what `verdict` calls for, which waits for a person."""
    DISMISS = "dismiss"
    """Let `verdict` be."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A request. `by` is user@machine as the asking program sees them."""

    request_id: str
    kind: RequestKind
    by: str
    created_unix_s: float
    host: str = ""
    reason: str = ""
    verdict: str = ""
    """Of an approval or a dismissal."""
    exit_code: int = 0
    """Of a job that stops as asked: 75 where a signal asked, so that whoever started the job starts it again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request. `is_done`: there is nothing more to come."""

    request_id: str
    is_accepted: bool
    is_done: bool
    text: str
    at_unix_s: float
