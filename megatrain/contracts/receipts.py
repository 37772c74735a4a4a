"""Receipts: who was told of an incident and when, or could not be told and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Receipt:
    """One thing that one receiver was told of an incident, or the last try to tell it."""

    receiver: str
    """Its kind: slack, pagerduty, email, alertmanager or webhook."""
    stage: str
    """What was told: open (it began), under-way (the job is mending it) or closed (it is over)."""
    at_unix_s: float
    """When the receiver took the message; of one that it did not take: when that was tried last."""
    trouble: str = ""
    """Why the last try failed; empty: the receiver has taken the message."""
    num_failed: int = 0
    """Tries that failed."""
