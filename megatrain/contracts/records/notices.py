"""The state of a job's notification receivers, kept in etcd so that the next driver can continue.

A receipt records which receiver was notified of an incident and when, or why it was not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Receipt:
    """One notification of an incident to one receiver, or the last attempt to send it."""

    receiver: str
    """The section of its configuration, such as slack or slack-2."""
    stage: str
    """What was sent: open (the incident began), under-way (the job is recovering) or closed (the incident is over)."""
    at_unix_s: float
    """When the receiver accepted the message, or else the time of the last attempt."""
    problem: str = ""
    """Why the last attempt failed; empty if the receiver has accepted the message."""
    num_failed: int = 0
    """Failed attempts."""


@dataclass(frozen=True, slots=True)
class ReceiverRecord:
    """One receiver. Only the elected driver's host writes it, after each attempt to send it a message."""

    receiver: str
    """The section of its configuration, such as slack or slack-2."""
    notified: Mapping[str, str] = field(default_factory=dict)
    """The last state sent to it, by topic: "open:amber", "under-way:amber", "closed:amber"."""
    opened_unix_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By level: the times of the last hour's messages about new topics."""
    num_sent: int = 0
    """Messages that the receiver has accepted."""
    num_failed: int = 0
    """Failed attempts."""
    num_given_up: int = 0
    """Topics that were never sent to it, because they had ended too long ago."""
    problem: str = ""
    """Why the last attempt failed; empty if it succeeded."""
    receipts: Mapping[str, tuple[Receipt, ...]] = field(default_factory=dict)
    """By topic, for the newest incidents: its messages and their times. The driver copies them to the incidents."""
