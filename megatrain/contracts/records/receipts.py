"""Receipts: which receivers were notified of an incident and when, or why not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Receipt:
    """One notification of an incident to one receiver, or the last attempt to send it."""

    receiver: str
    """Its kind: slack, pagerduty, email, alertmanager or webhook."""
    stage: str
    """What was sent: open (it began), under-way (the job is recovering) or closed (it is over)."""
    at_unix_s: float
    """When the receiver accepted the message; if it has not, the time of the last attempt."""
    trouble: str = ""
    """Why the last attempt failed; empty if the receiver has accepted the message."""
    num_failed: int = 0
    """Failed attempts."""
