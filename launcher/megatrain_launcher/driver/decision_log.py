"""Selects the lines to log. Each halt, round, incident and end of a job, each activity that lasts, and each alarm is
logged once.

An alarm is a condition that an operator should fix. It stays in the driver's report while it lasts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from megatrain_job.coordination.maintenance import EtcdAlarm
from megatrain_launcher.driver.actions import Alarm, Decision, EndJob, HaltRound, OpenIncident, SkipRound, WriteRound

_logger = logging.getLogger(__name__)
_LASTING_S = 1.0
# a number that counts or measures, but not a number in a host's name
_NUMBER = re.compile(r"(?<![\w.-])\d+(\.\d+)?(?![\w-])")


class DecisionLog:
    """Returns the lines to log, without repetitions. Not thread-safe."""

    def __init__(self) -> None:
        self._logged = ""
        self._pending = ""
        self._pending_since = 0.0

    def line(self, decision: Decision, now: float) -> str:
        """Return the line to log now; empty if nothing is new.

        Unless the decision acts, a text that differs from the last one only in its numbers is not new.
        """
        acts = HaltRound | WriteRound | SkipRound | EndJob | OpenIncident
        is_act = any(isinstance(action, acts) for action in decision.actions)
        gist = decision.reason if is_act else _NUMBER.sub("#", decision.reason)
        if gist != self._pending:
            self._pending, self._pending_since = gist, now
        if gist == self._logged or not (is_act or now - self._pending_since >= _LASTING_S):
            return ""
        self._logged = gist
        return decision.reason


class CurrentAlarms:
    """The current alarms: those of the last decision and those of etcd. Not thread-safe."""

    def __init__(self) -> None:
        self._by_topic: dict[str, str] = {}
        self._etcd: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self._by_topic.values(), *self._etcd)

    def add_refusal(self, text: str) -> None:
        """Record that etcd refuses writes, until `set_etcd_alarms` replaces this text by etcd's own alarms."""
        if text not in self._etcd:
            _logger.error("alarm: %s", text)
            self._etcd = (*self._etcd, text)

    def update(self, decision: Decision) -> None:
        """Replace the alarms by those of a decision, and log the alarms with new topics."""
        found = {action.topic: action.text for action in decision.actions if isinstance(action, Alarm)}
        for topic, text in found.items():
            if topic not in self._by_topic:
                _logger.error("alarm: %s", text)
        self._by_topic = found

    def set_etcd_alarms(self, found: Sequence[EtcdAlarm]) -> None:
        """Replace the alarms of etcd, and log new ones."""
        texts = tuple(f"etcd member {alarm.member_id:x} raises {alarm.name}" for alarm in found)
        for text in texts:
            if text not in self._etcd:
                _logger.error("alarm: %s", text)
        self._etcd = texts
