"""Selects what is logged of decisions: each action once, and the job's current activity when it lasts."""

from __future__ import annotations

import re

from megatrain_launcher.driver.actions import Decision, EndJob, HaltRound, OpenIncident, SkipRound, WriteRound

_LASTING_S = 1.0
# a number that counts or measures; not one inside a host's name
_NUMBER = re.compile(r"(?<![\w.-])\d+(\.\d+)?(?![\w-])")


class DecisionLog:
    """Remembers what was logged. For one thread."""

    def __init__(self) -> None:
        self._logged = ""
        self._pending = ""
        self._pending_since = 0.0

    def line(self, decision: Decision, now: float) -> str:
        """Return the line to log now; empty if nothing is new. A text that differs only in its numbers is not new."""
        acts = HaltRound | WriteRound | SkipRound | EndJob | OpenIncident
        is_act = any(isinstance(one, acts) for one in decision.actions)
        gist = decision.reason if is_act else _NUMBER.sub("#", decision.reason)
        if gist != self._pending:
            self._pending, self._pending_since = gist, now
        if gist == self._logged or not (is_act or now - self._pending_since >= _LASTING_S):
            return ""
        self._logged = gist
        return decision.reason
