"""What a job's receivers of notifications know: kept in etcd, so that the next driver continues where one ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.contracts.receipts import Receipt


@dataclass(frozen=True, slots=True)
class ReceiverRecord:
    """One receiver. The elected driver's host alone writes it, after each message that the receiver has taken."""

    receiver: str
    """Its kind: slack, pagerduty, email, alertmanager or webhook."""
    told: Mapping[str, str] = field(default_factory=dict)
    """What it knows, by topic: "open:amber", "under-way:amber", "closed:amber"."""
    opened_unix_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By level: when it got messages of the last hour about something new."""
    num_sent: int = 0
    """Messages that it has taken."""
    num_failed: int = 0
    """Tries that failed."""
    num_given_up: int = 0
    """Topics that were never sent to it: over for too long."""
    trouble: str = ""
    """Why the last try failed; empty when it did not."""
    receipts: Mapping[str, tuple[Receipt, ...]] = field(default_factory=dict)
    """By topic, of the newest incidents: what was sent to it and when. The driver copies them to the incidents."""
