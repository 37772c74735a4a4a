"""What an operator should mend: logged once, and in the driver's report for as long as it lasts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatrain.coordination.maintenance import Alarm as EtcdAlarm
from megatrain_launcher.driver.actions import Alarm, Decision

_logger = logging.getLogger(__name__)


class AlarmBook:
    """The alarms of now: those of the last decision, and those of etcd. For one thread."""

    def __init__(self) -> None:
        self._by_topic: dict[str, str] = {}
        self._etcd: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self._by_topic.values(), *self._etcd)

    def note_refusal(self, text: str) -> None:
        """Tell that etcd takes no writes; its own alarms will say so, too."""
        if text not in self._etcd:
            _logger.error("alarm: %s", text)
            self._etcd = (*self._etcd, text)

    def ring(self, decision: Decision) -> None:
        """Take over the alarms of a decision; a new topic goes to the log."""
        found = {action.topic: action.text for action in decision.actions if isinstance(action, Alarm)}
        for topic, text in found.items():
            if topic not in self._by_topic:
                _logger.error("alarm: %s", text)
        self._by_topic = found

    def note_etcd(self, found: Sequence[EtcdAlarm]) -> None:
        """Take over what etcd complains of. Training goes on without new decisions when it has no room."""
        texts = tuple(f"etcd member {alarm.member_id:x} raises {alarm.name}" for alarm in found)
        for text in texts:
            if text not in self._etcd:
                _logger.error("alarm: %s", text)
        self._etcd = texts
