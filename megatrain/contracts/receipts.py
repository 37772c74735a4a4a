"""Receipts: which receivers were notified of an incident and when, or why not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Receipt:
    """One notification of an incident to one receiver, or the last try to send it."""

    receiver: str
    """Its kind: slack, pagerduty, email, alertmanager or webhook."""
    stage: str
    """What was sent: open (it began), under-way (the job is mending it) or closed (it is over)."""
    at_unix_s: float
    """When the receiver took the message; of one that it did not take: when that was tried last."""
    trouble: str = ""
    """Why the last try failed; empty: the receiver has taken the message."""
    num_failed: int = 0
    """Tries that failed."""
