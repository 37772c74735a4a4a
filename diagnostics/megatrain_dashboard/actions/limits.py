"""Limits the rate of actions of the page, so that repeated requests of an operator or of a faulty page break no job.

Pure functions. Actions are counted from the audit, so a restart of the dashboard loses no count. The driver has its
own limits too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.formatting import count_text, seconds_text
from megatrain.run_files.action_log import INTENT, ActionEntry

WINDOW_S = 3600.0
MAX_BREAKS = 4
"""Actions of BREAKING per hour. Each costs the whole job a minute or more; four are enough to try several remedies."""
MAX_OTHERS = 20
"""Other actions per hour. They cost little. A person needs no more of them, and scripts use the command line."""
MAX_PART_OF_HOSTS = 0.25
"""A fault that affects a quarter of all hosts is not a fault of the hosts, so evicting more of them does not help."""

BREAKING = ("restart", "evict", "stop")
REMOVING = ("evict", "cordon")


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit that is reached: a sentence for people, and the seconds until the next action is possible."""

    text: str
    wait_s: float


def excess(kind: str, target: str, past: Sequence[ActionEntry], num_hosts: int, now_s: float) -> Excess | None:
    """Return the limit that one more action of a kind would break. `past` holds entries of the audit, in any order."""
    begun = [entry for entry in past if entry.stage == INTENT and entry.at_unix_s > now_s - WINDOW_S]
    is_breaking = kind in BREAKING
    alike = [entry for entry in begun if (entry.kind in BREAKING) is is_breaking]
    most = MAX_BREAKS if is_breaking else MAX_OTHERS
    if len(alike) >= most:
        names = f"{', '.join(BREAKING[:-1])} and {BREAKING[-1]}" if is_breaking else "other actions"
        return Excess(
            f"{names}: at most {most} an hour through this page, and this limit is reached", _wait_s(alike, most, now_s)
        )
    if kind in REMOVING:
        return _host_excess(target, [entry for entry in begun if entry.kind in REMOVING], num_hosts, now_s)
    return None


def _host_excess(target: str, removals: Sequence[ActionEntry], num_hosts: int, now_s: float) -> Excess | None:
    most = max(1, int(num_hosts * MAX_PART_OF_HOSTS))
    newest = {removal.target: removal for removal in sorted(removals, key=lambda removal: removal.at_unix_s)}
    if target in newest or len(newest) < most:
        return None
    text = (
        f"{len(newest)} of {count_text(num_hosts, 'host')} {'was' if len(newest) == 1 else 'were'} removed within the "
        f"last {seconds_text(WINDOW_S)}; through this page at most {count_text(most, 'host')} may be removed in that "
        "time"
    )
    return Excess(text, _wait_s(tuple(newest.values()), most, now_s))


def _wait_s(entries: Sequence[ActionEntry], most: int, now_s: float) -> float:
    """Return the seconds until enough entries have left the window for one more to fit."""
    times = sorted(entry.at_unix_s for entry in entries)
    return max(0.0, times[len(times) - most] + WINDOW_S - now_s)
