"""Which decisions are worth a line in the log: each action once, and the job's present activity when it lasts."""

from __future__ import annotations

import re

from megatrain_launcher.driver.actions import Decision, EndJob, HaltRound, OpenIncident, SkipRound, WriteRound

_LASTING_S = 1.0
# a number by itself, which counts or measures; not that of a host's name
_NUMBER = re.compile(r"(?<![\w.-])\d+(\.\d+)?(?![\w-])")


class DecisionLog:
    """Remembers what was said. For one thread."""

    def __init__(self) -> None:
        self._said = ""
        self._pending = ""
        self._pending_since = 0.0

    def line(self, decision: Decision, now: float) -> str:
        """Return what is to be said now, empty when that is nothing new: other numbers are not."""
        acts = HaltRound | WriteRound | SkipRound | EndJob | OpenIncident
        is_act = any(isinstance(one, acts) for one in decision.actions)
        gist = decision.reason if is_act else _NUMBER.sub("#", decision.reason)
        if gist != self._pending:
            self._pending, self._pending_since = gist, now
        if gist == self._said or not (is_act or now - self._pending_since >= _LASTING_S):
            return ""
        self._said = gist
        return decision.reason
