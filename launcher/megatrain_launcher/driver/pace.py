"""When a driver may decide: after a delay only once it has read the new events, and with a pause after each decision.

A process that was stopped for a while, or a machine that slept, finds the clock far ahead and the events of that time
unread. Without this rule, healthy hosts would look silent.
"""

from __future__ import annotations

_HELD_UP_S = 1.0
_SETTLE_S = 0.5
"""How long the watch has to read the events that waited for it."""
_PAUSE_FACTOR = 4
"""The pause after a decision, as a multiple of the time it took to compute; events meanwhile are handled together."""
_MAX_PAUSE_S = 0.1


class Pace:
    """Times are monotonic. For one thread."""

    def __init__(self, now_s: float) -> None:
        self._began_pass_s = now_s
        self._settled_s = now_s

    def begin_pass(self, now_s: float) -> float:
        """Note a pass of the loop; return for how long the loop was held up before it, 0 if it was not."""
        held_up_s = now_s - self._began_pass_s
        self._began_pass_s = now_s
        if held_up_s <= _HELD_UP_S:
            return 0.0
        self._settled_s = now_s + _SETTLE_S
        return held_up_s

    def may_decide(self, now_s: float) -> bool:
        return now_s >= self._settled_s

    @staticmethod
    def pause_s(decision_s: float) -> float:
        """Return the pause after a decision that took this long to make."""
        return min(_MAX_PAUSE_S, _PAUSE_FACTOR * decision_s)
