"""How often people may act through the page: a person in doubt, or a page gone mad, must not take a job apart. Pure.

Counted from the audit, so that a new start of the dashboard forgets nothing. The driver has limits of its own besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.contracts.action_log import INTENT, ActionEntry
from megatrain.contracts.texts import count_text, seconds_text

WINDOW_S = 3600.0
MAX_BREAKS = 4
"""Each costs the whole job a minute or more: four an hour is what a person needs who tries one thing after another."""
MAX_OTHERS = 20
"""These cost little; more than one every three minutes is a script's doing, which has the command line."""
MAX_PART_OF_HOSTS = 0.25
"""A fault that takes a quarter of all hosts is none of hosts: whoever evicts more has the wrong suspect."""

BREAKING = ("restart", "evict", "stop")
REMOVING = ("evict", "cordon")


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit that is reached, a sentence, and when the next action is possible."""

    text: str
    wait_s: float


def excess(kind: str, target: str, past: Sequence[ActionEntry], num_hosts: int, now_s: float) -> Excess | None:
    """Return which limit one more action of a kind would break; `past` holds entries of the audit, in any order."""
    begun = [one for one in past if one.stage == INTENT and one.at_unix_s > now_s - WINDOW_S]
    is_breaking = kind in BREAKING
    alike = [one for one in begun if (one.kind in BREAKING) is is_breaking]
    most = MAX_BREAKS if is_breaking else MAX_OTHERS
    if len(alike) >= most:
        names = f"{', '.join(BREAKING[:-1])} and {BREAKING[-1]}" if is_breaking else "other actions"
        return Excess(f"{names}: {most} an hour through this page, and so many there were", _wait_s(alike, most, now_s))
    if kind in REMOVING:
        return _host_excess(target, [one for one in begun if one.kind in REMOVING], num_hosts, now_s)
    return None


def _host_excess(target: str, removals: Sequence[ActionEntry], num_hosts: int, now_s: float) -> Excess | None:
    most = max(1, int(num_hosts * MAX_PART_OF_HOSTS))
    newest = {one.target: one for one in sorted(removals, key=lambda one: one.at_unix_s)}
    if target in newest or len(newest) < most:
        return None
    text = (
        f"{count_text(len(newest), 'host')} of {num_hosts} were taken away within the last {seconds_text(WINDOW_S)}, "
        f"and through this page no more than {count_text(most, 'host')} may be"
    )
    return Excess(text, _wait_s(tuple(newest.values()), most, now_s))


def _wait_s(entries: Sequence[ActionEntry], most: int, now_s: float) -> float:
    """Return when so many have left the window that one more fits."""
    times = sorted(one.at_unix_s for one in entries)
    return max(0.0, times[len(times) - most] + WINDOW_S - now_s)
