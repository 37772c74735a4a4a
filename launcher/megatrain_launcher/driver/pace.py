"""When a driver may decide: never on knowledge from before it was delayed, and with a pause after each decision.

A process that was stopped for a while, or a machine that slept, finds the clock far ahead and the news of the meantime
not yet read: hosts would look silent that are not.
"""

from __future__ import annotations

_HELD_UP_S = 1.0
_SETTLE_S = 0.5
"""How long the watch has to read what waited for it."""
_REST_PARTS = 4
"""A decision is followed by a pause of so many times as long as it took to think: events meanwhile come in one go."""
_LONGEST_REST_S = 0.1


class Pace:
    """Times are monotonic. For one thread."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._settled_s = now_s

    def look(self, now_s: float) -> float:
        """Note a turn of the loop; return for how long the loop was held up before it, 0 where it was not."""
        held_up_s = now_s - self._looked_s
        self._looked_s = now_s
        if held_up_s <= _HELD_UP_S:
            return 0.0
        self._settled_s = now_s + _SETTLE_S
        return held_up_s

    def may_decide(self, now_s: float) -> bool:
        return now_s >= self._settled_s

    @staticmethod
    def rest_s(thinking_s: float) -> float:
        """Return the pause after a decision that took so long to make."""
        return min(_LONGEST_REST_S, _REST_PARTS * thinking_s)
