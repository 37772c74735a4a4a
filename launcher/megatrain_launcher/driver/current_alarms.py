"""Conditions that an operator should fix: each is logged once and stays in the driver's report while it lasts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatrain_job.coordination.maintenance import EtcdAlarm
from megatrain_launcher.driver.actions import Alarm, Decision

_logger = logging.getLogger(__name__)


class CurrentAlarms:
    """The current alarms: those of the last decision and those of etcd. For one thread."""

    def __init__(self) -> None:
        self._by_topic: dict[str, str] = {}
        self._etcd: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self._by_topic.values(), *self._etcd)

    def note_refusal(self, text: str) -> None:
        """Record that etcd refuses writes; etcd's own alarms will report this too."""
        if text not in self._etcd:
            _logger.error("alarm: %s", text)
            self._etcd = (*self._etcd, text)

    def update(self, decision: Decision) -> None:
        """Replace the alarms by those of a decision, and log new topics."""
        found = {action.topic: action.text for action in decision.actions if isinstance(action, Alarm)}
        for topic, text in found.items():
            if topic not in self._by_topic:
                _logger.error("alarm: %s", text)
        self._by_topic = found

    def note_etcd(self, found: Sequence[EtcdAlarm]) -> None:
        """Replace the alarms of etcd. When etcd is out of space, training continues without new decisions."""
        texts = tuple(f"etcd member {alarm.member_id:x} raises {alarm.name}" for alarm in found)
        for text in texts:
            if text not in self._etcd:
                _logger.error("alarm: %s", text)
        self._etcd = texts
